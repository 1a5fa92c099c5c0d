"""Fully sharded data parallel (FSDP2): each rank keeps a shard of every parameter.

torch shards a model in units: here the task's pieces, and one unit for the rest of the model.
Before a unit runs, its ranks all-gather its parameters; afterwards they free them. The backward
pass gathers the parameters again, and reduce-scatters the unit's gradients at once. With two data
axes (`hsdp`), parameters are sharded along one and replicated along the other, so that all-gathers
stay within a node.

These collectives match tensors by position and size. Ranks with another order, or with other
parameters, get each other's numbers without an error, or hang. If data take different branches of
the model on each rank, the collectives must therefore stay the same: `Units` ensures that.

Mixed precision gives the same numbers as autocast, with half as much to gather. Autocast casts a
matrix when a layer multiplies by it, and the backward pass needs this copy again. Under sharding,
copies that outlive their layer would add up to the whole model on every rank. Therefore each rank
casts its shard before the all-gather, which gives the same numbers. Only the parameters of linear
layers and convolutions are cast, as nothing but multiplications reads them. Norms, embeddings and a
layer's own parameters are gathered uncast, since autocast ignores them or rounds only results.
FSDP's own policy would round all parameters, and the inputs of each unit: values far from 0 would
lose their differences.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ..cli.config import Config
from ..errors import UsageError
from ..model.trees import mapped, tensors_of
from ..runtime import devices
from ..runtime.devices import parse_size, written
from .base import DTYPES, Parts, is_sharded
from .checksum import checksums
from .consistency import tie

_MULTIPLIED: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight", "bias"),
    nn.Conv1d: ("weight", "bias"),
    nn.Conv2d: ("weight", "bias"),
    nn.Conv3d: ("weight", "bias"),
    nn.ConvTranspose1d: ("weight", "bias"),
    nn.ConvTranspose2d: ("weight", "bias"),
    nn.ConvTranspose3d: ("weight", "bias"),
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias"),
}
"""Parameters that a layer's own forward() uses only in multiplications lowered by autocast."""
MOST = 0.1
"""Share of device memory that unsharded gradients may take, to save exchanges."""


def apply(
    model: nn.Module, pieces: Sequence[str], mesh: DeviceMesh, config: Config, *, task: str
) -> "Units":
    """Shard a model along `mesh`: one dimension to shard, or two to replicate and to shard.

    Works in place: parameters become new objects, DTensors. An optimizer that was built before
    would train nothing, without an error.

    Pieces that share a parameter belong to the unit of the whole model: the parameter stays
    gathered from the first piece to the last, and gradients from all pieces are added before the
    reduction.

    Raises:
        UsageError: a parameter is empty or has no dimension to shard, or its type differs from
            that of other parameters in its unit.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(
                f"task {task!r}: parameter {name!r} is a single number without a dimension, which "
                "sharded data parallel cannot share out; make it a tensor of shape [1], or use "
                "--strategy ddp"
            )
        if not parameter.numel() and parameter.requires_grad:
            raise UsageError(
                f"task {task!r}: parameter {name!r} of shape {list(parameter.shape)} is empty, "
                "and sharded data parallel reduces no empty gradient; leave the parameter out, or "
                "use --strategy ddp"
            )
    # A linear layer's output is a view whenever its input has three dimensions.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # No casts by torch: see the docstring of this module.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    units = own_units(model, pieces)
    _check_types(model, units, task=task)
    # The whole model comes last: its unit takes the parameters outside the pieces' units.
    for module in [*map(model.get_submodule, units), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if config.precision != "fp32":
        _gather_matrices_in(DTYPES[config.precision], model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums, so gradients must be as well: no division by the number of ranks.
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo cannot multiply by that factor during the reduction.
            module.set_force_sum_reduction_for_comms(True)
            # Parameters that only some ranks' data use are reduced like all others.
            module.set_reduce_scatter_unused_params(True)
    # In a rehearsal tensors have no contents.
    return Units(model, units, task=task, look=not config.dry_run)


def _check_types(model: nn.Module, units: Sequence[str], *, task: str) -> None:
    """Refuse a unit with trained parameters of several types: torch reduces them as one.

    Raises:
        UsageError: names one parameter of each type.
    """
    for unit in [*units, ""]:
        rest = [other for other in units if other != unit]
        kinds: dict[torch.dtype, str] = {}
        for name, parameter in model.named_parameters():
            within = not unit or name.startswith(f"{unit}.")
            if within and parameter.requires_grad and not _within(name, rest):
                kinds.setdefault(parameter.dtype, name)
        if len(kinds) > 1:
            both = " and ".join(
                f"{name!r} of {str(dtype).removeprefix('torch.')}" for dtype, name in kinds.items()
            )
            raise UsageError(
                f"task {task!r}: sharded data parallel reduces the gradients of "
                f"{f'piece {unit!r}' if unit else 'the rest outside the pieces'} together, "
                f"which are of several types ({both}): make them one type, have pieces() name a "
                "module around each, or use --strategy ddp"
            )


def _within(name: str, pieces: Iterable[str]) -> bool:
    return any(name.startswith(f"{piece}.") for piece in pieces)


def own_units(model: nn.Module, pieces: Sequence[str]) -> list[str]:
    """Name the pieces that become separate units: they have parameters, and share none."""
    homes: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        within = [piece for piece in pieces if name.startswith(f"{piece}.")]
        homes.setdefault(id(parameter), set()).update(within or [""])
    shared = {piece for names in homes.values() if len(names) > 1 for piece in names}
    own = {piece for names in homes.values() for piece in names} - shared
    return [piece for piece in pieces if piece and piece in own]


def tie_again(model: nn.Module, ties: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
    """Restore shared parameters after `to_empty()`, which gives each module a separate one."""
    for places in ties:
        module, name = places[0]
        tie(places, module.get_parameter(name))
    for _, group in _parameter_groups(model) if ties else ():
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def _parameter_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each sharded module with each of its FSDP parameter groups."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield module, group


class Units:
    """The units of one model on this rank, observed through torch's own hooks."""

    def __init__(
        self, model: nn.Module, pieces: Sequence[str], *, task: str, look: bool = True
    ) -> None:
        """Watch a sharded model, itself a unit, and the units in it, in the order of the pass.

        `look`: in the first step, also compare the values of parameters.
        """
        self._model, self.pieces, self._task = model, tuple(pieces), task
        self._next = 0
        self._with_gradient: set[int] = set()
        self._groups: list[Any] = []
        self._names: dict[int, str] = {}
        # For gathered copies of parameters: torch's count of writes, and checksums until the first
        # step is over.
        self._versions: dict[int, int] = {}
        self._contents: dict[int, Tensor] | None = {} if look else None
        self._overwritten: set[int] = set()
        self._copies: list[tuple[Any, Tensor]] | None = None
        self._tensors: list[Tensor] = []
        self._before: list[int] = []
        numbers = {id(model.get_submodule(name)): n for n, name in enumerate(self.pieces)}
        # Public hooks would be compiled along with a piece, or run too early or too late.
        for module, group in _parameter_groups(model):
            self._groups.append(group)
            group.pre_forward = self._before_use(group, group.pre_forward)
            group.post_forward = self._after_use(group, group.post_forward)
            group.post_backward = self._noting(group, group.post_backward)
            if any(parameter.requires_grad for parameter in module.parameters()):
                group.post_forward = _wanting_gradient(group.post_forward)
            if (number := numbers.get(id(module))) is not None:
                group.pre_forward = self._in_turn(number, group.pre_forward)
        if self.pieces:
            model.register_forward_pre_hook(self._begin_pass)
            model.register_forward_hook(self._end_pass)

    def begin_step(self) -> None:
        """Reset the record of parameters with gradients."""
        self._with_gradient.clear()

    def without_gradient(self) -> frozenset[str]:
        """Name the parameters without a gradient from this rank's data in this step."""
        if not self._names:
            # Not earlier: weights on the device `meta` are replaced after sharding.
            owners = {id(p): name for name, p in self._model.named_parameters()}
            self._names = {
                id(parameter): owners[id(parameter.sharded_param)]
                for group in self._groups
                for parameter in group.fsdp_params
                if parameter.sharded_param.requires_grad
            }
        if len(self._with_gradient) == len(self._names):
            return frozenset()
        missing = self._names.keys() - self._with_gradient
        return frozenset(self._names[number] for number in missing)

    def has_written(self) -> bool:
        """Whether a pass of this step has written a gathered copy; call this once per step."""
        if self._copies is None:
            # Ranks gather into the same tensors in every step.
            pairs = [
                (parameter, getattr(parameter, "_unsharded_param", None))
                for group in self._groups
                for parameter in group.fsdp_params
            ]
            self._copies = [(parameter, copy) for parameter, copy in pairs if copy is not None]
            self._tensors = [copy for _, copy in self._copies]
            self._before = [self._versions.get(id(p), copy._version) for p, copy in self._copies]
        self._contents = None
        versions = [copy._version for copy in self._tensors]
        if versions != self._before:
            for (parameter, _), before, now in zip(
                self._copies, self._before, versions, strict=True
            ):
                if before != now:
                    self._overwritten.add(id(parameter))
        return bool(self._overwritten)

    def written(self) -> list[str]:
        """Name the parameters with overwritten copies."""
        owners = {id(p): name for name, p in self._model.named_parameters()}
        overwritten = [
            parameter
            for group in self._groups
            for parameter in group.fsdp_params
            if id(parameter) in self._overwritten
        ]
        # A module holds the shard or the gathered copy: pipeline stages stay gathered.
        both = [(id(p.sharded_param), id(p._unsharded_param)) for p in overwritten]
        return [owners[own if own in owners else gathered] for own, gathered in both]

    def _before_use(self, group: Any, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Record checksums of a unit's gathered parameters in the first step."""

        def enter(*arguments: Any) -> Any:
            result = pre_forward(*arguments)
            if self._contents is not None:
                for parameter in group.fsdp_params:
                    whole = parameter._unsharded_param
                    self._versions.setdefault(id(parameter), whole._version)
                    self._contents[id(parameter)] = checksums([whole], whole.device)
            return result

        return enter

    def _after_use(self, group: Any, post_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Compare checksums before copies are freed: torch counts no writes through `.data`."""

        def leave(*arguments: Any) -> Any:
            if self._contents is not None:
                for parameter in group.fsdp_params:
                    whole, before = parameter._unsharded_param, self._contents.get(id(parameter))
                    if before is not None and not torch.equal(
                        checksums([whole], whole.device), before
                    ):
                        self._overwritten.add(id(parameter))
            return post_forward(*arguments)

        return leave

    def _noting(self, group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Record a unit's parameters with gradients, before the others get zeros."""

        def note(*arguments: Any) -> Any:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                ):
                    self._with_gradient.add(id(parameter))
            _widen_gradients(group)
            return post_backward(*arguments)

        return note

    def _in_turn(self, number: int, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse a piece that runs out of order: other ranks would gather the expected piece."""

        def enter(*arguments: Any) -> Any:
            if number != self._next:
                self._refuse(number)
            self._next += 1
            return pre_forward(*arguments)

        return enter

    def _begin_pass(self, module: nn.Module, arguments: object) -> None:
        self._next = 0

    def _end_pass(self, module: nn.Module, arguments: object, outputs: object) -> None:
        if self._next != len(self.pieces):
            self._refuse(len(self.pieces))

    def _refuse(self, number: int) -> None:
        if number < self._next:
            what = f"{self.pieces[number]!r} runs a second time"
        else:
            what = f"{self.pieces[self._next]!r} is left out"
        raise UsageError(
            f"task {self._task!r}: the pieces of its model are sharded one by one and must run in "
            f"each pass, once and one after the other ({', '.join(map(repr, self.pieces))}), but "
            f"{what}: ranks that take another branch would mix up each other's parameters; have "
            "pieces() name a module around the branch (or '', the whole model), or use "
            "--strategy ddp"
        )


def _wanting_gradient(post_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward pass reach a unit on every rank, even if the rank's data bypassed it.

    Otherwise this rank would gather and reduce the unit later than its peers, or never.
    """

    def leaf(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            # A new tensor: the given one may be part of the batch.
            return value.detach().requires_grad_()
        return value

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        outputs = post_forward(module, inputs, outputs)
        if torch.is_grad_enabled() and not any(t.requires_grad for t in tensors_of(outputs)):
            return mapped(leaf, outputs)
        return outputs

    return leave


def _gather_matrices_in(precision: torch.dtype, model: nn.Module) -> None:
    """Cast parameters used only in multiplications to `precision` before ranks gather them."""
    # Gradients are summed with the precision of one process.
    as_it_is = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    lowered = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)

    def choosing(policy: MixedPrecisionPolicy, choose: Callable[..., None]) -> Callable[..., None]:
        return lambda _: choose(policy)

    for _, group in _parameter_groups(model):
        parameters: list[Any] = group.fsdp_params
        # A unit's gradients have one type, and autocast casts only fp32.
        if {p.sharded_param.dtype for p in parameters} == {torch.float32}:
            for parameter in parameters:
                policy = lowered if _only_multiplied(parameter) else as_it_is
                parameter.init_dtype_attrs = choosing(policy, parameter.init_dtype_attrs)


def _only_multiplied(parameter: Any) -> bool:
    """Whether all modules that share a unit's parameter only multiply by it."""
    info, layers = parameter._module_info, _MULTIPLIED.items()
    places = [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
    return all(
        any(type(module).forward is layer.forward and name in names for layer, names in layers)
        for module, name in places
    )


def _widen_gradients(group: Any) -> None:
    """Cast the gradients of one unit to the type of their joint reduction.

    A parameter gathered in half precision has a gradient in half precision, as has a copy made by
    autocast.
    """
    for parameter in group.fsdp_params:
        if parameter.param_dtype is None or not hasattr(parameter, "_unsharded_param"):
            continue
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        unused = parameter.unsharded_accumulated_grad is None
        if unused and group.reduce_grads and parameter.sharded_param.requires_grad:
            # This rank's data do not use the parameter: send zeros.
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                parameter.unsharded_param, dtype=parameter.reduce_dtype
            )


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """When gradients are reduced in a step of several micro-batches, and the reason.

    After the last micro-batch: one reduction per step, but until then each rank keeps unsharded
    gradients of all parameters. After each micro-batch: more reductions, but each rank keeps only
    sharded gradients. (Replicas of a shard, with `--dp-replicate`, are summed after the last
    micro-batch either way.)
    """

    when: Literal["last", "each"]
    """The micro-batches of a step that are followed by a reduction."""
    why: str
    """The reason in words; empty if both choices are the same."""

    def __str__(self) -> str:
        which = "the last" if self.when == "last" else "each"
        return f"gradients are reduced after {which} micro-batch: {self.why}" if self.why else ""

    def prepare(self, model: nn.Module, *, last: bool) -> None:
        """Set up the next backward pass, the step's last or not, to reduce or add up gradients."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or self.when == "each")
            model.set_requires_all_reduce(last)


def choose_gradient_sync(parts: Parts, model: nn.Module, micro_batches: int) -> GradientSync:
    """Choose for a sharded model; all ranks call this and make the same choice."""
    config, layout = parts.config, parts.layout
    sharded = layout.dp_shard * layout.cp > 1
    if layout.pp > 1:
        why = "the schedules of pipelines do so" if sharded else ""
        return GradientSync(when="last", why=why)
    if micro_batches == 1 or not sharded:
        return GradientSync(when="last", why="")
    if (chosen := config.gradient_sync) != "auto":
        return GradientSync(when=chosen, why=f"--gradient-sync {chosen}")
    whole = whole_gradients(model.parameters())
    if not config.dry_run:
        # Ranks may have devices with different memory sizes.
        return by_memory(whole, min(parts.group.gather(devices.memory_of_a_rank(parts.group))))
    given = config.device_memory
    return by_memory(whole, None if given is None else parse_size(given))


def by_memory(whole: int, device: int | None) -> GradientSync:
    """Reduce after the last micro-batch if unsharded gradients take little of the memory.

    Args:
        whole: bytes of the gradients of all parameters that a rank gathers.
        device: bytes of a rank's device; None: unknown.

    >>> by_memory(7 * 2**30, 80 * 2**30).when, by_memory(9 * 2**30, 80 * 2**30).when
    ('last', 'each')
    """
    cost = f"whole, they take {written(whole)}"
    if device is None:
        limit = written(whole / MOST)
        why = f"{cost}; on devices of less than {limit}, after each: say --device-memory"
        return GradientSync(when="last", why=why)
    limit = f"than {MOST:.0%} of a device's {written(device)}"
    if whole <= MOST * device:
        return GradientSync(when="last", why=f"{cost}, no more {limit}")
    return GradientSync(when="each", why=f"{cost}, more {limit}")


def whole_gradients(parameters: Iterable[nn.Parameter]) -> int:
    """Count the bytes of gradients that are not sharded along the data axes.

    The count is equal on all ranks: for a tensor-parallel parameter, it uses the largest part.
    """
    total = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        count = parameter.numel()
        if is_sharded(parameter):
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, parameter.placements, strict=True):
                if name == "tp" and not placement.is_replicate():
                    count = -(-count // parameter.device_mesh["tp"].size())
        # FSDP accumulates gradients over micro-batches in the reduction type, fp32 at least.
        total += count * max(parameter.element_size(), torch.float32.itemsize)
    return total
