import pytest

from phalanx.cli.main import main


def test_the_bubble_of_a_given_batch_is_not_said_to_need_more_microbatches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The search has tried more microbatches of the same batch: only a larger batch is left."""
    words = "plan --model llama3-1b --cluster h100:8 --strategy pp4,dp2 --sequence 512".split()
    assert main([*words, "--global-batch", "16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a larger batch with more microbatches lowers this part" in said
