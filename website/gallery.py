"""The gallery: each committed example beside the job file and the profile that it comes from."""

from tests.support.golden import EXAMPLES
from website.notebook import fenced
from website.sources import ROOT, place_of

CAPTIONS = {
    "slurm/examples/digits.sbatch": (
        "Two nodes",
        "A small training on CPUs. The first 65 lines of the script are its story; the functions "
        "stand below.",
    ),
    "slurm/examples/digits-in-podman.sbatch": (
        "The same in podman",
        "The same job file on a site whose nodes run containers with podman.",
    ),
    "slurm/examples/chars.sbatch": (
        "Several workers per node",
        "A small language model: two workers on each of two nodes.",
    ),
    "slurm/examples/sweep.sbatch": (
        "A sweep",
        "All points of a grid in one script and one job array.",
    ),
    "slurm/examples/llm-on-a100.sbatch": (
        "GPUs, modules, a virtual environment",
        "Nearly every key of a job file at once: sixteen nodes with eight A100 each.",
    ),
    "slurm/examples/llm-in-pyxis.sbatch": (
        "GPUs in pyxis",
        "The same job file in containers of pyxis and enroot.",
    ),
    "slurm/examples/llm-in-apptainer.sbatch": (
        "GPUs in Apptainer",
        "The same job file in containers of Apptainer.",
    ),
    "k8s/examples/digits.yaml": (
        "PyTorchJob",
        "The small training as a PyTorchJob of the Training Operator, in restricted pods.",
    ),
    "k8s/examples/digits-trainjob.yaml": (
        "TrainJob",
        "The same job file for Kubeflow Trainer 2.",
    ),
    "k8s/examples/digits-jobset.yaml": ("JobSet", "The same job file as a JobSet."),
    "k8s/examples/digits-job.yaml": (
        "Job",
        "The same job file as a plain indexed Job: no operator is needed.",
    ),
    "k8s/examples/chars.yaml": (
        "Several workers per pod",
        "The same language model in two pods.",
    ),
    "k8s/examples/llm-on-gpus.yaml": (
        "GPUs",
        "Sixteen pods with eight GPUs each, RDMA, a queue of Kueue, a secret, a volume with data.",
    ),
}
"""Title and a sentence for each example."""

_KINDS = {"slurm": ("Slurm", "bash"), "k8s": ("Kubernetes", "yaml")}


def pages() -> dict[str, str]:
    """Return the pages of the gallery by their place: the first one shows all examples."""
    assert CAPTIONS.keys() == EXAMPLES.keys(), "each example needs a caption"
    parts = [
        "# Gallery",
        "Each page shows a job file and a profile on the left, and on the right what "
        "`toolkit render` makes of them: a text to read, commit, and use alone. The tests render "
        "all of them again.",
    ]
    found = {}
    for folder, (site, _) in _KINDS.items():
        cards = []
        for path in CAPTIONS:
            if path.startswith(f"{folder}/"):
                title, sentence = CAPTIONS[path]
                place = place_of(path)
                link = f"[{title}]({place.removeprefix('gallery/')})"
                cards.append(f"<li markdown>**{link}**<br>{sentence}</li>")
                found[place] = _page(path)
        items = "\n".join(cards)
        parts += [f"## {site}", f'<ul class="cards" markdown>\n{items}\n</ul>']
    return {"gallery/index.md": "\n\n".join(parts) + "\n", **found}


def titles() -> dict[str, str]:
    """Return the titles for the navigation by the places of the pages."""
    return {
        place_of(path): f"{_KINDS[path.partition('/')[0]][0]}: {title}"
        for path, (title, _) in CAPTIONS.items()
    }


def _page(path: str) -> str:
    site, language = _KINDS[path.partition("/")[0]]
    title, sentence = CAPTIONS[path]
    job, profile, *changes = EXAMPLES[path]
    command = " ".join(["toolkit render", job, "--to", profile, *(f"--set {c}" for c in changes)])
    left = [_code(job, "yaml"), _code(profile, "yaml")]
    return "\n\n".join(
        [
            "---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---",
            f"# {site}: {title}",
            sentence,
            fenced(command, "bash"),
            '<div class="pair" markdown>\n<div markdown>',
            *left,
            "</div>\n<div markdown>",
            _code(path, language),
            "</div>\n</div>\n",
        ]
    )


def _code(path: str, language: str) -> str:
    return fenced((ROOT / path).read_text(encoding="utf-8"), language, title=path)
