"""How a profile is found by its name, and which files that a command finds are believed.

A profile decides what runs: its prolog, its templates, the host that gets the secrets. So one that
is found rather than named counts only if nobody else could have written it.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import ProfileError, did_you_mean
from toolkit.profile.base import BUILT_IN, built_in, read_profile
from toolkit.text.own_files import user_folder, why_not_own

if TYPE_CHECKING:
    from toolkit.profile import Profile

_MOST_TEMPLATES = 10_000
"""How many files and folders of a `templates_dir` are looked at; no site has as many."""


def load_profile(
    name: str, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> "Profile":
    """Return a profile by its name or by the path of its file.

    A name is looked up in `slurm/profiles` and `k8s/profiles` of `folder` or the nearest folder
    above it that has them, up to the top of the repository, then in the user's configuration
    folder, then among the built-in ones. Above a folder that is in no repository, others' profiles
    are passed over.

    Raises:
        ProfileError: no such profile, every problem of its file, or a file that was found and that
            others could have written.
    """
    if is_path(name):
        is_found = name == default_profile(environ=environ)
        return _believed(Path(name)) if is_found else read_profile(Path(name))
    search = _Search(folder or Path.cwd(), environ)
    if path := search.file(name):
        return _believed(path, is_own=search.is_own(path))
    if profile := built_in(name):
        return profile
    names = profile_names(folder=folder, environ=environ)
    searched = ", ".join(map(str, search.folders()))
    passed = "".join(f"; not searched: {why}" for why in search.passed_over)
    raise ProfileError(
        f"no profile {name!r}; {did_you_mean(name, names)} (searched {searched}; a path works too)"
        + passed
    )


def as_profile(profile: "str | Profile") -> "Profile":
    """Return a profile that may be given by its name or by the path of its file.

    Raises:
        ProfileError: as from `load_profile()`.
    """
    return load_profile(profile) if isinstance(profile, str) else profile


def profile_names(
    *, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the names of all profiles that `load_profile` finds, sorted."""
    places = _Search(folder or Path.cwd(), environ).folders()
    files = (path for place in places for path in place.glob("*.yaml"))
    return sorted({path.stem for path in files} | set(BUILT_IN))


def origin_notes(
    name: str, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return what a user should know of where the profile of this name comes from.

    Nothing of the project's own profile, of a built-in one, or of a file that the user has named.
    """
    if is_path(name):
        is_default = name == default_profile(environ=environ)
        return (f"the default profile is {name}",) if is_default else ()
    search = _Search(folder or Path.cwd(), environ)
    path = search.file(name)
    notes = [f"{why}; it is ignored" for why in search.passed_over]
    if path is not None and not search.is_own(path):
        notes.append(f"profile {name!r} is {path}")
    elif path is not None and (hidden := search.users / path.name).is_file():
        notes.append(f"profile {name!r} is {path}, not yours in {hidden}")
    return tuple(notes)


def is_path(name: str) -> bool:
    """Whether a profile is named by its file."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def require_default_profile() -> str:
    """Return the file of the default profile.

    Raises:
        ProfileError: no profile is the default one.
    """
    if (name := default_profile()) is None:
        raise ProfileError(
            "no profile is selected, and there is no default profile: name one with --to, or run "
            "`toolkit init`, which detects the site and writes a profile"
        )
    return name


def default_profile(*, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the file of the default profile; None without one.

    `toolkit init` writes its path into the file `default` of the user's configuration folder; a
    relative path is below that folder.
    """
    folder = configuration_folder(environ)
    try:
        named = (folder / "default").read_text(encoding="utf-8").strip()
        if not named.isprintable():
            raise ProfileError(f"{folder / 'default'} holds {named[:80]!r}, which is not a path")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{folder / 'default'} cannot be read: {error}") from None
    return str(folder / named)


def configuration_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's configuration folder of the toolkit."""
    return user_folder("CONFIG", environ)


_PLACES = ("slurm/profiles", "k8s/profiles")


def _is_top(folder: Path) -> bool:
    """Whether a folder is the top of a repository that is this user's own."""
    git = folder / ".git"
    return os.path.lexists(git) and not why_not_own(git, by_owner_alone=True)


class _Search:
    """Where profiles are looked for, from a folder on."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.users = configuration_folder(environ) / "profiles"
        self.passed_over: list[str] = []
        """Why others' profiles above the project were passed over."""
        self._own: list[Path] = []
        self._above: list[Path] = []
        above = (folder, *folder.parents)
        top = next((one for one in above if _is_top(one)), None)
        for one in above:
            # os.path, since a folder above may be closed to this user.
            places = [one / name for name in _PLACES if os.path.isdir(one / name)]  # noqa: PTH112
            if top is None and one != folder:
                self._above = list(self._others_passed_over(places))
            else:
                self._own = places
            if self._own or self._above or one == top:
                break

    def _others_passed_over(self, places: list[Path]) -> Iterator[Path]:
        for place in places:
            if why := why_not_own(place.parent, place):
                self.passed_over.append(why)
            else:
                yield place

    def folders(self) -> list[Path]:
        """Return the folders that may hold profiles, in the order of the search."""
        return [*self._own, *self._above, self.users]

    def file(self, name: str) -> Path | None:
        """Return the first file with a profile of this name."""
        # By their list: a name need not be one that a file can have.
        files = (path for place in self.folders() for path in place.glob("*.yaml"))
        return next((path for path in files if path.stem == name), None)

    def is_own(self, path: Path) -> bool:
        """Whether a file is the project's."""
        return path.parent in self._own


def _believed(path: Path, *, is_own: bool = False) -> "Profile":
    """Return the profile in a file that was found, and that nobody else could have written.

    In the project itself, the members of a team may have the right to write: they write the job
    files and the code as well.

    Raises:
        ProfileError: others could have written it or its templates, or every problem of the file.
    """
    folder = path.parent
    folders = [folder.parent, folder] if folder.name == "profiles" else [folder]
    why = why_not_own(*folders, path, by_owner_alone=is_own)
    profile = read_profile(path) if not why else None
    if profile is not None and profile.templates_dir is not None:
        templates = _templates_below(Path(profile.templates_dir))
        why = why_not_own(*templates, by_owner_alone=is_own)
    if profile is None or why:
        raise ProfileError(
            f"{why}, so others could decide what runs in your name; look at it, then make it "
            f"yours, or name the file: --to {path}"
        )
    return profile


def _templates_below(folder: Path) -> Iterator[Path]:
    """Yield a folder of templates and what is in it; nothing where it is missing."""
    if folder.is_dir():
        yield folder
        yield from islice(folder.rglob("*"), _MOST_TEMPLATES)
