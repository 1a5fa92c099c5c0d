"""The rendered examples that people read, and that the tests compare with.

`make golden` (`python -m tests.support.golden`) writes them again; look at the difference, then
commit.
"""

import json
import re
import tempfile
from pathlib import Path

import toolkit
from tests.support import packaged_schemas
from tests.support.reference import PAGES

ROOT = Path(__file__).parents[2]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "slurm/examples/digits.sbatch": ("jobs/digits.yaml", "slurm/profiles/slurm.yaml"),
    "slurm/examples/sweep.sbatch": ("jobs/sweep.yaml", "slurm/profiles/slurm.yaml"),
    "slurm/examples/chars.sbatch": ("jobs/chars.yaml", "slurm/profiles/slurm.yaml"),
    "slurm/examples/llm-on-a100.sbatch": (
        "tests/data/jobs/llm.yaml",
        "tests/data/profiles/a100.yaml",
    ),
    "slurm/examples/digits-in-podman.sbatch": ("jobs/digits.yaml", "slurm/profiles/podman.yaml"),
    "slurm/examples/llm-in-pyxis.sbatch": (
        "tests/data/jobs/llm.yaml",
        "tests/data/profiles/pyxis.yaml",
    ),
    "slurm/examples/llm-in-apptainer.sbatch": (
        "tests/data/jobs/llm.yaml",
        "tests/data/profiles/apptainer.yaml",
    ),
    "k8s/examples/digits.yaml": ("jobs/digits.yaml", "k8s/profiles/k8s.yaml"),
    **{
        f"k8s/examples/digits-{kind.lower()}.yaml": (
            "jobs/digits.yaml",
            "k8s/profiles/k8s.yaml",
            f"kubernetes.workload={kind}",
        )
        for kind in ("TrainJob", "JobSet", "Job")
    },
    "k8s/examples/chars.yaml": ("jobs/chars.yaml", "k8s/profiles/k8s.yaml"),
    "k8s/examples/llm-on-gpus.yaml": (
        "tests/data/jobs/llm.yaml",
        "tests/data/profiles/gpu-cluster.yaml",
    ),
}
"""Example: job file and profile, below the project's folder, and changes of the job."""


def rendered(job: str, profile: str, *changes: str) -> str:
    """Return what the example must hold."""
    spec, site = toolkit.load(ROOT / job, changes), toolkit.load_profile(str(ROOT / profile))
    if "supervisor" in type(site).model_fields:  # as text it is no part of an example
        site = site.model_copy(update={"supervisor": "installed"})
    return toolkit.render(toolkit.plan(spec, site))


def with_its_script(readme: str) -> str:
    """Return README.md with the script of its job file and the number of its lines."""
    (job,) = re.findall(r"^cat >job.yaml <<'END'\n(.*?)^END$", readme, re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "job.yaml")).write_text(job)
        text = toolkit.render(toolkit.plan(toolkit.load(path), toolkit.SlurmProfile(name="slurm")))
    # The supervisor and its checksum, which differ after each change of it.
    script = re.sub(r"(?m)(?<=^# supervisor.pyz: ).*|(?<=supervisor-)\w{12}|\b\w{64}\b", "…", text)
    readme = re.sub(r"(?<=prints )\d+(?= lines)", str(script.count("\n")), readme)
    return re.sub(r"(?ms)(?<=^```bash\n)#!.*?(?=^```$)", lambda _: script, readme)


def main() -> None:
    """Write every example, the reference pages and the schemas again."""
    for path, example in EXAMPLES.items():
        (ROOT / path).write_text(rendered(*example))
    page = ROOT / "README.md"
    page.write_text(with_its_script(page.read_text()))
    schemas = {"job": toolkit.json_schema(), "profile": toolkit.profile_schema()}
    for path, written in PAGES.items():
        (ROOT / path).write_text(written())
    for name, schema in schemas.items():
        text = json.dumps(schema, indent=2, ensure_ascii=False)
        (ROOT / f"docs/reference/{name}.schema.json").write_text(f"{text}\n")
    packaged_schemas.PATH.write_text(packaged_schemas.text())


if __name__ == "__main__":
    main()
