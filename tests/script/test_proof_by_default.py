"""`phalanx run` compares the first steps of a script with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from proof_scripts import RIGHT, WRONG, script

from phalanx.cli.main import main

SAVING = """
run.print("printed")
if run.is_first:
    open("effects", "a").write("once ")
"""


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ran(text: str, strategy: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a script; return the exit code and what was printed on standard error."""
    Path("script.py").write_text(text)
    code = main(["run", "script.py", "--strategy", strategy])
    return code, capfd.readouterr().err


def test_a_script_is_compared_once(capfd: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text("rate = 0.3")
    Path("data.txt").write_text("2.0")
    text = script(
        before="import own",
        model="mlp(nn.Dropout(own.rate))",
        after="data.tensors[0].mul_(float(open('data.txt').read()))",
    )
    text += SAVING
    code, said = ran(text, "dp2", capfd)
    assert code == 0 and "over 4 steps: dp2 computes what one process computes" in said
    assert Path("effects").read_text() == "once "
    assert len(list(Path("checkpoints").rglob("step-*"))) == 1
    code, said = ran(text, "dp2", capfd)
    assert code == 0 and "proof over" not in said
    for name, other in (("own.py", "rate = 0.2"), ("data.txt", "3.0")):
        Path(name).write_text(other)
        assert "proof over 4 steps: dp2 computes what" in ran(text, "dp2", capfd)[1]


def test_a_mean_of_means_is_stopped_before_the_save(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = ran(script(**WRONG["dropped count"]), "dp2", capfd)
    assert code == 1 and "first at step 1, gradient of 2.bias" in said
    assert not Path("checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_raises_no_alarm(
    name: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = ran(script(**RIGHT[name]), strategy, capfd)
    if name == "several models" and strategy == "fsdp2":  # a ModuleDict has no forward
        assert code == 2, said
        return
    assert code == 0, said
    assert ("computes what" in said) != ("not proved" in said)
    assert "on one process script.py ends" not in said
    assert any(Path("cache").rglob("proved/*")) == ("proof over 4 steps" in said)
    grows = ("DistributedSampler", "batch that grows with the ranks")
    assert ("batches grow with the number of ranks" in said) == (name in grows)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_stops_the_job(
    name: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = ran(script(**WRONG[name]), strategy, capfd)
    assert code != 0, said
    assert name != "batch size by ranks" or "the global batch, on any number of ranks" in said
    assert not Path("checkpoints").exists()
