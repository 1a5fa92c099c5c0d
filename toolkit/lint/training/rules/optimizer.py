"""Rules about optimizer steps."""

import ast
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import Loop, TrainingScript


def _optimizer_steps(script: TrainingScript) -> list[ast.Call]:
    """Return the `step()` calls of optimizers and gradient scalers."""
    steps = []
    for call in script.methods("step"):
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        if isinstance(owner, ast.Name) and (
            "optim" in owner.id.lower()
            or owner.id in ("opt", "scaler")
            or any(
                isinstance(value, ast.Call)
                and script.full_name(value.func).startswith("torch.optim.")
                and ".lr_scheduler" not in script.full_name(value.func)
                for value in script.values_of(owner.id)
            )
        ):
            steps.append(call)
    return steps


def _clears(script: TrainingScript) -> list[ast.AST]:
    """Return the calls and assignments that clear gradients: `zero_grad()` or `grad = None`."""
    cleared: list[ast.AST] = list(script.methods("zero_grad"))
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets
        ):
            cleared.append(node)
    return cleared


@TRAINING.rule(
    "zero-grad-missing",
    finds="optimizer steps without clearing the gradients",
    reason="backward() adds to the existing gradients: each step uses the sum over all steps "
    "so far.",
    fix="call optimizer.zero_grad() before backward(), or after optimizer.step()",
)
def _never_cleared(script: TrainingScript) -> Iterator[Violation[int]]:
    if script.is_wrapped or _clears(script) or not script.methods("backward"):
        return
    for step in _optimizer_steps(script)[:1]:
        loops, function = script.loops_of(step), script.function_of(step)
        beside = [b for b in script.methods("backward") if script.function_of(b) is function]
        repeated = any(loop in script.parents(b) for b in beside for loop in loops)
        if repeated or (loops and not beside):
            yield Violation(step.lineno, "nothing clears the gradients between these steps")


@TRAINING.rule(
    "zero-grad-in-micro-step",
    finds="gradients cleared in each micro-step, with an optimizer step only after several",
    reason="Only the last part of the accumulated batch counts, and no error is raised.",
    fix="clear them where the step is made: step(), then zero_grad(), under the same if",
)
def _cleared_too_often(script: TrainingScript) -> Iterator[Violation[int]]:
    clears = [(clear, script.loops_of(clear)) for clear in _clears(script)]
    for step in _optimizer_steps(script):
        loops = script.loops_of(step)
        if not loops or not (counted := _micro_step_test(script, step, loops[0])):
            continue
        if _has_own_gradients(script, step, loops[0]):
            continue
        for clear, own in clears:
            if own[:1] == loops[:1] and not _micro_step_test(script, clear, loops[0]):
                what = f"gradients are cleared in each pass, steps are made if {counted}"
                yield Violation(clear.lineno, what)  # type: ignore[attr-defined]


def _has_own_gradients(script: TrainingScript, step: ast.AST, loop: Loop) -> bool:
    """Whether only the passes with a step compute its gradients, as a GAN's generator does."""
    for test, other in script.conditions_of(step):
        counts = any(isinstance(one, ast.Mod) for one in ast.walk(test.test))
        if counts and loop in script.parents(test):
            calls = script.methods("backward")
            branches = [dict(script.conditions_of(call)).get(test) for call in calls]
            return other in branches and (not other) not in branches
    return False


def _micro_step_test(script: TrainingScript, node: ast.AST, loop: Loop) -> str:
    """Return a node's condition with a remainder (`%`) inside the loop; empty without one."""
    for test, _ in script.conditions_of(node):
        counts = any(isinstance(one, ast.Mod) for one in ast.walk(test.test))
        if counts and loop in script.parents(test):
            return ast.unparse(test.test)[:60]
    return ""
