"""Create, publish, verify and remove checkpoint folders; a folder gets its final name last."""

from __future__ import annotations

import functools
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.checkpoint.tensor_file import SUFFIX, ObjectFile, open_file
from phalanx.errors import CheckpointError, StoreError
from phalanx.object_store import address_of, fetch, listed, modified_s, put, remove, size_of
from phalanx.storage import PARTIAL, STALE_S, checksum, publish_folder, sync


def verify(folder: Path, about: Manifest, turn: int = 0, num_turns: int = 1) -> None:
    """Compare files of a checkpoint with the checksums in its manifest.

    Of tensors in an object store only the size: their blocks are compared when they are read.

    The files are split into `num_turns` parts of about equal bytes; this call reads part `turn`.

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message names the file and
            older checkpoints of the run that can be used instead.
    """
    loads = [0] * num_turns
    for name, (num_bytes, sha256) in sorted(about.files.items(), key=lambda item: -item[1][0]):
        lightest = loads.index(min(loads))
        loads[lightest] += num_bytes
        if lightest != turn:
            continue
        problem = _problem(folder / about.save / name, num_bytes, sha256)
        if problem is not None:
            raise CheckpointError(
                f"its file {name} {problem}{manifest.older_checkpoints_hint(folder)}"
            )


def find_whole(path: Path, *, compares: bool) -> Checkpoint:
    """Return the checkpoint that `path` names, or the latest of a run that is not damaged.

    Args:
        path: a checkpoint, or the folder of a run.
        compares: whether to compare all files with their checksums, which all ranks at once must
            not; else only manifests are checked.

    Raises:
        CheckpointError: there is no complete checkpoint, or each is damaged.
    """
    # The latest checkpoint may be damaged, or be removed by the run while this looks at it:
    #
    #     step 300    a checksum differs        -> noted as damaged
    #     step 200    gone meanwhile            -> look for the latest again
    #     step 100    whole                     -> returned, with the damaged ones
    damaged: dict[Path, str] = {}
    run = manifest.run_folder(path)
    is_run = run == path or path.name == "checkpoints"
    for folder in reversed(manifest.saved_states(run).values()) if is_run else ():
        try:
            checkpoint = manifest.find_and_read(folder)
            if compares:
                with ThreadPoolExecutor(4) as pool:
                    work = functools.partial(verify, folder, checkpoint.about, num_turns=4)
                    list(pool.map(work, range(4)))
            return checkpoint._replace(damaged=damaged)
        except CheckpointError as error:
            if manifest.identity(folder) is None:  # the run has removed it meanwhile
                return find_whole(path, compares=compares)
            damaged[folder] = f"{folder}: {str(error).partition(manifest.OLDER)[0]}"
    return manifest.find_and_read(path)


def _problem(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Return how a file differs from its recorded size and sha256; None if it matches."""
    try:
        is_remote = address_of(path) is not None and path.suffix == SUFFIX
        if is_remote or fetch(path).is_file():
            actual = size_of(path) if is_remote else path.stat().st_size
            if actual != num_bytes:
                return f"has {actual} bytes, but {num_bytes} were written"
        if not is_remote and checksum(path)[1] != sha256:
            return "is damaged: its sha256 differs from the recorded one"
    except FileNotFoundError:
        return "is missing"
    except StoreError:
        raise
    except CheckpointError:
        return "is a link, a folder or a device, expected a regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def open_tensors(folder: Path, about: Manifest, name: str) -> Any:
    """Open a tensor file of a checkpoint; for the errors see `open_file` and `ObjectFile`."""
    path, is_here = folder / about.save / name, address_of(folder) is None
    blocks = about.blocks.get(name, ())
    return open_file(path) if is_here else ObjectFile(path, about.files[name], blocks)


def partial_of(final: Path, save: str) -> Path:
    """Return the folder in which a `save` writes the checkpoint `final`.

    It is temporary; in an object store it is a new folder in `final`, and stays.
    """
    return final.with_name(final.name + PARTIAL) if address_of(final) is None else final / save


def make_partial(final: Path, save: str = "", *, replaces: bool = False) -> Path:
    """Create and return the folder in which a `save` writes the checkpoint `final`.

    Also remove the temporary folders that killed runs left, see `_is_left`. Exception: a complete
    checkpoint that `publish` had renamed to REMOVED without publishing its replacement gets its
    name back. A folder that cannot be removed stays until the next save.

    Args:
        final: folder of the checkpoint once it is published.
        save: name of the save, which no other has; used in object stores.
        replaces: whether `final` may be a complete checkpoint already; `publish` then replaces it.

    Raises:
        CheckpointError: `final` is a complete checkpoint and `replaces` is False, or a folder with
            files that no save writes.
        OSError: the folder cannot be created.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    whole, is_here = manifest.complete_checkpoints(final.parent.parent), address_of(final) is None
    for path in final.parent.iterdir() if is_here else ():
        if path.suffix == manifest.REMOVED and path in whole.values():
            path.rename(path.with_suffix(""))
        elif path.suffix in (PARTIAL, manifest.REMOVED) and _is_left(path):
            _remove(path)
    is_other = final.is_dir() and not (final / manifest.NAME).exists() and not _is_left(final)
    if is_here and is_other:
        raise CheckpointError("there is a folder of that name with other files; move it away")
    if not replaces and (final / manifest.NAME).exists():
        raise CheckpointError("there is one of that name already")
    partial = partial_of(final, save)
    partial.mkdir(parents=True, exist_ok=True)  # files that could not be removed are overwritten
    return partial


def _is_left(folder: Path) -> bool:
    """Return whether only saves can have written a folder: its name and its files are theirs."""
    name = folder.name.removesuffix(folder.suffix)
    if not re.fullmatch(r"(step|weights)-[0-9]+", name):
        return False
    has_ours = folder.is_dir() and all(_OURS.fullmatch(path.name) for path in folder.iterdir())
    return folder.is_symlink() or has_ours


_OURS = re.compile(rf"rank-[0-9]+\.safetensors|{re.escape(index.NAME)}|{re.escape(manifest.NAME)}")
"""Names of the files of a checkpoint."""


def publish(
    partial: Path, final: Path, about: Manifest, moved: Callable[[], None] = lambda: None
) -> None:
    """Write the manifest into `partial`, sync the folder to disk, and rename it to `final`.

    A folder cannot be renamed over a non-empty one, so an existing `final` is first renamed to end
    with REMOVED. Until the new folder has its name, `complete_checkpoints` returns the old one.

    Args:
        partial: folder with the files of all ranks.
        final: folder of the checkpoint.
        about: manifest of the checkpoint, with the checksums of the files.
        moved: called after each step that waits for the disk.

    Raises:
        CheckpointError: a file that a rank has written is missing.
        OSError: the disk is full, or the folder cannot be renamed.
    """
    if address_of(final) is not None:
        return _publish_objects(partial, final, about)
    for name in about.files:
        if not (partial / name).is_file():
            raise CheckpointError(
                f"{name} is not in {partial}, though a rank has written it; --out must be on a "
                "disk that all hosts share"
            )
    manifest.write(partial, about)
    sync(partial / manifest.NAME)
    moved()
    # Replacing a checkpoint, and what a kill after each line leaves as the checkpoint of step N:
    #
    #     sync(partial)                         step-N, the old one
    #     step-N         -> step-N.removed      step-N.removed, the old one
    #     step-N.partial -> step-N              step-N, the new one
    #     remove step-N.removed                 step-N, the new one
    removed = final.with_name(final.name + manifest.REMOVED)
    is_there = final.exists()  # a checkpoint to replace, or a folder without a manifest
    sync(partial)  # if the sync fails, the checkpoint to replace is still in place
    moved()
    if is_there:
        final.rename(removed)
    publish_folder(partial, final)
    moved()
    if is_there:
        _remove(removed)


def _publish_objects(partial: Path, final: Path, about: Manifest) -> None:
    """Publish a checkpoint to an object store; see `publish`."""
    # What a kill after each line leaves as the checkpoint of step N; B replaces A:
    #
    #     step-N/A/...  step-N/B/rank-0   (ranks)    the one of A, if there was one
    #     step-N/B/index.json                        the one of A
    #     step-N/manifest.json            names B    the one of B
    #     remove step-N/A/...                        the one of B
    #
    # No object that a manifest names is ever written again, and a manifest is written last and
    # removed first. So whoever reads a manifest has all it names, or finds another manifest.
    put(partial / index.NAME, (partial / index.NAME).read_bytes())
    there = listed(partial)
    for name, (num_bytes, _) in about.files.items():
        if there.get(partial / name, {}).get("size") != num_bytes:
            raise CheckpointError(f"{partial / name} is not there, though a rank has written it")
    manifest.write(partial, about)
    content, replaced = (partial / manifest.NAME).read_bytes(), fetch(final / manifest.NAME)
    former = manifest.read(final).save if replaced.exists() else None
    try:
        put(final / manifest.NAME, content, is_new=former is None)
    except FileExistsError as error:
        raise CheckpointError("another process has saved one of that name meanwhile") from error
    (partial / manifest.NAME).unlink()
    with suppress(OSError):
        remove(listed(final / former) if former else ())


def remove_older(
    run: Path, keep: int | None, best: int | None = None, moved: Callable[[], None] = lambda: None
) -> None:
    """Remove the complete checkpoints of a run that later ones make obsolete.

    Obsolete are the passing checkpoints (see `Manifest.is_passing`) except the latest checkpoint,
    and the others except the last `keep`. The checkpoint after `best` steps is never removed.
    A checkpoint that cannot be removed does not fail the run: the next save tries again.

    Args:
        run: folder of the run.
        keep: number of latest checkpoints to keep, besides passing ones; None keeps all.
        best: steps of the best evaluation, or None.
        moved: called after each checkpoint.
    """
    with suppress(OSError):
        checkpoints = manifest.complete_checkpoints(run)
        # keep 2, best 30     step  10   20p  30p  40   50   60p        p: passing
        # removed                   10   20p                            30p is the best
        # stay                                30p  40   50   60p        60p is the latest
        whole = list(checkpoints.values())
        passing = manifest.temporary_checkpoints(run)
        lasting = [folder for folder in whole if folder not in passing]
        older = [folder for folder in passing if folder != whole[-1]]
        older += [] if keep is None else lasting[:-keep]
        for folder in older:
            if best is not None and folder == checkpoints.get(best):
                continue
            removed = folder.with_name(folder.name + manifest.REMOVED)
            with suppress(OSError):
                if address_of(folder) is None:
                    _remove(folder.rename(removed))
                else:
                    remove([folder / manifest.NAME, *listed(folder)])
                    _remove(folder)
            moved()
    with suppress(OSError, CheckpointError):
        # Objects that no manifest names, and that no save is writing: killed runs left them.
        objects = {} if address_of(run) is None else listed(run / "checkpoints")
        folders = manifest.complete_checkpoints(run).values() if objects else ()
        named = {folder / manifest.read(folder).save for folder in folders}
        old_s = time.time() - STALE_S
        left = [path for path, about in objects.items() if modified_s(about) < old_s]
        remove(each for each in left if each.suffix == SUFFIX and each.parent not in named)


def _remove(folder: Path) -> None:
    """Remove a folder, or a symbolic link without its target; ignore errors.

    The manifest is removed first, so that a partly removed folder never looks complete.
    """
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        (folder / manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
