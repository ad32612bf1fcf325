"""The folder of a checkpoint: made under another name, published once whole, verified, removed."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.errors import CheckpointError
from phalanx.storage import PARTIAL, become, checksum, sync


def verify(folder: Path, about: Manifest, turn: int = 0, num_turns: int = 1) -> None:
    """Compare files of a checkpoint with their checksums.

    The files are dealt into `num_turns` parts of about the same bytes; part `turn` is read.

    Raises:
        CheckpointError: a file is missing, cut short or changed; names it, and what else there is.
    """
    loads = [0] * num_turns
    for name, (num_bytes, sha256) in sorted(about.files.items(), key=lambda item: -item[1][0]):
        lightest = loads.index(min(loads))
        loads[lightest] += num_bytes
        if lightest != turn:
            continue
        problem = _problem(folder / name, num_bytes, sha256)
        if problem is not None:
            raise CheckpointError(f"its file {name} {problem}{manifest.others_than(folder)}")


def _problem(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Say how a file differs from what was written."""
    try:
        if path.is_file() and (actual := path.stat().st_size) != num_bytes:
            return f"has {actual} bytes, but {num_bytes} were written"
        if checksum(path)[1] != sha256:
            return "is damaged: its sha256 is not the written one"
    except FileNotFoundError:
        return "is missing"
    except CheckpointError:
        return "is a link, a folder or a device, expected a regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def partial_of(final: Path) -> Path:
    """Return the folder in which the checkpoint `final` is written."""
    return final.with_name(final.name + PARTIAL)


def make_partial(final: Path, *, replaces: bool = False) -> Path:
    """Make the folder in which the checkpoint `final` is written, and return it.

    If it `replaces` one, there may be a whole checkpoint of that name, which `publish` removes.

    What killed runs left of any checkpoint is removed, but for one that `publish` was to replace
    and has not: that gets its name back. What cannot be removed stays: the next save tries again.

    Raises:
        CheckpointError: there is a whole checkpoint of that name.
        OSError: the folder cannot be made.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    whole = manifest.whole(final.parent.parent).values()
    for path in final.parent.iterdir():
        if path.suffix == manifest.REMOVED and path in whole:
            path.rename(path.with_suffix(""))
        elif path.suffix in (PARTIAL, manifest.REMOVED):
            _remove(path)
    if not replaces and (final / manifest.NAME).exists():
        raise CheckpointError("there is one of that name already")
    partial = partial_of(final)
    partial.mkdir(exist_ok=True)  # files that could not be removed are written over
    return partial


def publish(partial: Path, final: Path, about: Manifest) -> None:
    """Write the manifest into `partial`, have the disk hold everything, and name it `final`.

    No system renames a folder over another: a checkpoint of that name is found as one that is being
    removed meanwhile, see `manifest.whole`.

    Raises:
        CheckpointError: a file that a rank has written is not there.
        OSError: the disk is full, or the folder cannot be renamed.
    """
    for name in about.files:
        if not (partial / name).is_file():
            raise CheckpointError(
                f"{name} is not in {partial}, though a rank has written it; --out must be on a "
                "disk that all hosts share"
            )
    manifest.write(partial, about)
    sync(partial / manifest.NAME)
    removed = final.with_name(final.name + manifest.REMOVED)
    is_there = final.exists()  # it is to be replaced, or has no manifest
    sync(partial)  # a disk that refuses does so while the one to be replaced stands
    if is_there:
        final.rename(removed)
    become(partial, final)
    if is_there:
        _remove(removed)


def remove_older(run: Path, keep: int | None, best: int | None = None) -> None:
    """Remove those whole checkpoints of a run that later ones replace.

    Those are the passing ones, unless one is the latest, and the others but for the last `keep`;
    not the one after `best` steps.
    One that cannot be removed is no reason to end a run: the next save tries again.
    """
    found = manifest.whole(run)
    whole = list(found.values())
    passing = manifest.passing(run)
    lasting = [folder for folder in whole if folder not in passing]
    older = [folder for folder in passing if folder != whole[-1]]
    for folder in older + ([] if keep is None else lasting[:-keep]):
        if best is not None and folder == found.get(best):
            continue
        removed = folder.with_name(folder.name + manifest.REMOVED)
        with suppress(OSError):
            folder.rename(removed)
            _remove(removed)


def _remove(folder: Path) -> None:
    """Remove a folder, of a link the link alone; what cannot be removed stays.

    It loses its manifest before any other file, so that it never looks whole when it is not.
    """
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        (folder / manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
