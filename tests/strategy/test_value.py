"""The text form of a strategy, its rules, and what its errors propose."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import StrategyError
from phalanx.strategy import (
    AXES,
    KINDS,
    Axis,
    Recompute,
    Strategy,
    check_ranks,
    require_built,
    shrunk,
)


@st.composite
def axes(draw: st.DrawFn, name: str) -> Axis:
    kind = draw(st.sampled_from(sorted(KINDS[name])))
    rule = KINDS[name][kind]
    option = None if rule.option is None else draw(st.integers(rule.least, 9))
    if name != "tp" or kind in ("1d", "megatron"):
        return Axis(draw(st.integers(1, 64)), kind, option)
    side = draw(st.integers(1, 6))
    return Axis((option or 1) * side ** (3 if kind == "3d" else 2), kind, option)


@st.composite
def recomputes(draw: st.DrawFn) -> Recompute:
    kind = draw(st.sampled_from(sorted(KINDS["recompute"])))
    rule = KINDS["recompute"][kind]
    return Recompute(kind, draw(st.integers(rule.least, 9)) if rule.option else None)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    values = {name: draw(axes(name)) for name in AXES}
    sizes = st.lists(st.integers(1, 99), max_size=9).map(tuple)
    cut = draw(sizes) if values["pp"].degree > 1 else ()
    return Strategy(**values, recompute=draw(recomputes()), cut=cut)


@given(strategies())
def test_parse_undoes_str(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


@given(strategies(), st.randoms())
def test_any_order_reads_as_the_same_value(strategy: Strategy, random: object) -> None:
    parts = str(strategy).split(",")
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert str(Strategy.parse(" , ".join(parts))) == str(strategy)


@given(strategies())
def test_ranks_are_the_product_of_the_degrees(strategy: Strategy) -> None:
    degrees = [int(number) for number in re.findall(r"(?:^|,)[a-z]+(\d+)", str(strategy))]
    product = 1
    for degree in degrees:
        product *= degree
    assert strategy.num_ranks == product
    assert product % strategy.data_ranks == 0


@given(st.text(alphabet="dpfstcrecomute0123456789:/,. ", max_size=30))
def test_text_is_read_or_refused_in_our_own_words(text: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except StrategyError as error:
        assert str(error).startswith(f"strategy '{text}': ")
    else:
        assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "canonical", "num_ranks", "data_ranks"),
    [
        ("dp1", "dp1", 1, 1),
        ("dp2", "dp2", 2, 2),
        ("dp2:bucketed", "dp2", 2, 2),
        ("dp4:naive", "dp4:naive", 4, 4),
        ("tp4:2d,dp3", "dp3,tp4:2d", 12, 3),
        ("recompute:every/2,fsdp4:zero1", "fsdp4:zero1,recompute:every/2", 4, 4),
        ("cut:4+05,pp2,recompute:full", "pp2,recompute:full,cut:4+5", 2, 1),
        ("schedule:a/b.csv,pp2,cut:1+1", "pp2,cut:1+1,schedule:a/b.csv", 2, 1),
        (
            "pp2:1f1b,dp2,fsdp2,cp2:ring,tp4:2d,recompute:sqrt",
            "pp2,dp2,fsdp2,cp2,tp4:2d,recompute:sqrt",
            64,
            4,
        ),
    ],
)
def test_canonical_text(text: str, canonical: str, num_ranks: int, data_ranks: int) -> None:
    strategy = Strategy.parse(text)
    assert str(strategy) == canonical
    assert (strategy.num_ranks, strategy.data_ranks) == (num_ranks, data_ranks)


def test_another_degree_of_pp_has_no_cut() -> None:
    strategy = Strategy.parse("pp2,dp2,cut:4+5")
    assert str(strategy.with_degree("dp", 3)) == "pp2,dp3,cut:4+5"
    assert str(strategy.with_degree("pp", 3)) == "pp3,dp2"
    assert str(Strategy.parse("pp2,schedule:a.csv").with_degree("pp", 4)) == "pp4"
    with pytest.raises(StrategyError, match="'pp2,dp4,cut:4\\+5' would use them all"):
        check_ranks(strategy, 8)


def test_axes_are_read_by_name() -> None:
    strategy = Strategy.parse("dp4:ssp/3,tp8:2.5d/2")
    assert strategy.dp == Axis(4, "ssp", 3)
    assert (strategy.tp.degree, strategy.tp.kind, strategy.tp.option) == (8, "2.5d", 2)
    assert [name for name, _ in strategy.axes()] == ["pp", "dp", "fsdp", "cp", "ep", "tp"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read ''"),
        ("dp2,", "cannot read ''"),
        ("2dp", "cannot read '2dp'"),
        ("dp-1", "cannot read 'dp-1'"),
        ("dp2:/3", "cannot read"),
        ("dp", "lacks its degree; write dp2"),
        ("dp0", "at least 1, as dp1"),
        ("tpp4", "did you mean 'tp'?"),
        ("fdsp2", "did you mean 'fsdp'?"),
        ("dp2,tp2,dp4", "dp is named twice"),
        ("dp2:naiv", "did you mean 'naive'?"),
        ("pp2:1f1d", "did you mean '1f1b'?"),
        ("dp2:naive/3", "naive takes no option; write dp:naive"),
        ("pp4:interleaved", "lacks its option CHUNKS; write interleaved/2"),
        ("pp4:interleaved/1", "at least 2; write interleaved/2"),
        ("dp4:local/0", "at least 1; write local/1"),
        ("tp6:2d", "a square, q x q; the nearest is tp4:2d"),
        ("tp7:2.5d/2", "q x q x 2; the nearest is tp8:2.5d/2"),
        ("tp20:3d", "a cube, q x q x q; the nearest is tp27:3d"),
        ("recompute", "no degree, such as recompute:full"),
        ("recompute2:sqrt", "no degree, such as recompute:sqrt"),
        ("recompute:evry/2", "did you mean 'every'?"),
        ("pp2,cut", "cannot read 'cut'; expected the layers of each stage, such as cut:4+5"),
        ("pp2,cut2:4+5", "cannot read 'cut2:4+5'"),
        ("pp2,cut:4,5", "cannot read '5'"),
        ("pp2,cut:4+-5", "cannot read 'cut:4+-5'"),
        (
            "dp2,cut:4+5",
            "cut:4+5 lists stages of a pipeline, but the strategy has no pp; add pp2, or",
        ),
        ("pp2,cut:9+0", "cut:9+0: a stage has at least 1 layer"),
        ("pp2,schedule", "schedule needs a file, such as schedule:mine.csv"),
        ("dp2,schedule:a.csv", "needs pp without a kind, but pp is pp1; write pp2,schedule:a.csv"),
        ("pp4:zbv,schedule:a.csv", "but pp is pp4:zbv; write pp4,schedule:a.csv"),
    ],
)
def test_errors_name_the_thing_and_the_fix(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        Strategy.parse(text)


@given(st.sampled_from(["2d", "3d", "2.5d/3"]), st.integers(1, 5000))
def test_the_nearest_grid_is_the_nearest(kind: str, degree: int) -> None:
    depth, power = {"2d": (1, 2), "3d": (1, 3), "2.5d/3": (3, 2)}[kind]
    grids = [depth * side**power for side in range(1, 80)]
    try:
        Strategy.parse(f"tp{degree}:{kind}")
        assert degree in grids
    except StrategyError as error:
        proposed = int(re.findall(r"nearest is tp(\d+)", str(error))[0])
        assert proposed in grids
        assert abs(proposed - degree) == min(abs(grid - degree) for grid in grids)


def test_values_made_in_python_meet_the_same_rules() -> None:
    with pytest.raises(StrategyError, match="the nearest is tp4:2d"):
        Strategy(tp=Axis(5, "2d"))
    with pytest.raises(StrategyError, match="at least 1"):
        Strategy(dp=Axis(0, "naive"))


def text_of(name: str, kind: str) -> str:
    """Return a legal strategy text with one axis of a kind, or one way to recompute."""
    rule = KINDS[name][kind]
    option = f"/{rule.least}" if rule.option else ""
    return f"{name}{'' if name == 'recompute' else 8 if kind == '3d' else 4}:{kind}{option}"


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
)
def test_exactly_what_is_built_passes(name: str, kind: str) -> None:
    strategy = Strategy.parse(text_of(name, kind))
    if KINDS[name][kind].about or (name, kind) == ("recompute", "none"):
        require_built(strategy)
        if strategy.num_ranks > 1:
            require_built(Strategy.parse(f"{strategy},recompute:full"))
    else:
        with pytest.raises(StrategyError, match=f"{name}.* is not built yet; built: ppN, "):
            require_built(strategy)


@pytest.mark.parametrize("text", ["dp1:naive", "fsdp1:zero2", "dp2,fsdp1:zero1"])
def test_a_kind_of_what_splits_nothing_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="splits nothing, so its kind would be ignored"):
        require_built(Strategy.parse(text))


@pytest.mark.parametrize("text", ["dp2:ps,tp2", "dp2:async,fsdp2", "pp2,dp4:local/2"])
def test_a_worker_of_a_server_is_one_process(text: str) -> None:
    alone = next(part for part in text.split(",") if part.startswith("dp"))
    with pytest.raises(StrategyError, match=f"is one process, .*; write '{alone}'"):
        require_built(Strategy.parse(text))


@pytest.mark.parametrize(
    ("text", "num_ranks", "proposed"),
    [
        ("dp4", 3, "dp3"),
        ("dp2:naive", 1, "dp1"),
        ("fsdp2:zero1", 1, "dp1"),
        ("fsdp2", 3, "fsdp3"),
        ("tp4:2d", 8, "dp2,tp4:2d"),
        ("tp4:2d", 6, "dp6"),
        ("tp4:2d", 9, "tp9:2d"),
    ],
)
def test_ranks_that_do_not_fit(text: str, num_ranks: int, proposed: str) -> None:
    strategy = Strategy.parse(text)
    with pytest.raises(
        StrategyError, match=rf"needs {strategy.num_ranks} ranks.* {num_ranks};"
    ) as e:
        check_ranks(strategy, num_ranks)
    assert f"'{proposed}'" in str(e.value)


@given(strategies(), st.integers(1, 64))
def test_the_proposal_uses_every_rank(strategy: Strategy, num_ranks: int) -> None:
    try:
        check_ranks(strategy, num_ranks)
        assert strategy.num_ranks == num_ranks
    except StrategyError as error:
        proposed = re.findall(r"'([^']+)' would use them all", str(error))[0]
        check_ranks(Strategy.parse(proposed), num_ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp0", "strategy 'fsdp0': a degree must be at least 1, as fsdp1"),
        ("dp2\n", "strategy 'dp2\\n': cannot read 'dp2\\n'; expected AXIS DEGREE"),
        ("tp3:2d", "strategy 'tp3:2d': the degree must be a square"),
    ],
)
def test_a_strategy_is_named_once_as_it_was_given(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["x" * 25_000, "dp2:" + "k" * 25_000, "dp2," * 6000])
def test_a_long_strategy_is_not_printed_whole(text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    assert len(str(caught.value)) < 400


@given(strategies(), st.integers(1, 80), st.integers(1, 9), st.booleans())
def test_a_shrunk_strategy_is_legal_and_grows_with_the_ranks(
    strategy: Strategy, num_ranks: int, share: int, has_rows: bool
) -> None:
    strategy = dataclasses.replace(
        strategy,
        **{name: getattr(Strategy, name) for name, axis in strategy.axes() if axis.degree == 1},
    )
    try:
        require_built(strategy)
    except StrategyError:
        plain = Axis(strategy.dp.degree, "bucketed")
        strategy = dataclasses.replace(strategy, dp=plain, ep=Strategy.ep)
    rows = share * strategy.data_ranks if has_rows else None
    fewer, more = (shrunk(strategy, number, rows) for number in (num_ranks, num_ranks + 1))
    require_built(fewer)
    assert Strategy.parse(str(fewer)) == fewer
    assert fewer.num_ranks <= more.num_ranks <= num_ranks + 1
    assert fewer.num_ranks <= min(num_ranks, strategy.num_ranks)
    assert fewer.recompute == strategy.recompute
    assert rows is None or rows % fewer.data_ranks == 0
    assert shrunk(strategy, strategy.num_ranks, rows) == strategy
    if num_ranks >= strategy.num_ranks // (strategy.dp.degree * strategy.fsdp.degree):
        data = {"dp": strategy.dp, "fsdp": strategy.fsdp}
        assert dataclasses.replace(fewer, **data) == strategy


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "rows", "expected"),
    [
        ("dp4", 3, 12, "dp3"),
        ("dp4", 3, 8, "dp2"),
        ("fsdp4:zero2", 3, 12, "fsdp3:zero2"),
        ("dp2,fsdp2", 3, 12, "fsdp2"),
        ("dp4,fsdp2:zero1", 7, None, "dp3,fsdp2:zero1"),
        ("dp2,tp2", 3, 12, "tp2"),
        ("pp2,tp2,recompute:full", 3, 12, "tp2,recompute:full"),
        ("pp2:zb/1,dp2,cut:3+1", 3, 12, "pp2:zb/1,cut:3+1"),
        ("pp4:zb/1,cut:1+1+1+3", 3, 12, "pp3:zb/1"),
        ("pp2,schedule:mine.csv", 1, 12, "dp1"),
        ("dp2,cp4:ulysses", 3, 12, "cp2:ulysses"),
        ("tp4:2d", 3, 12, "tp2"),
        ("tp16:2d", 5, 12, "tp4:2d"),
        ("dp3,tp9:2d", 8, 12, "dp2,tp3"),
        ("dp4:quorum/3", 2, None, "dp2:quorum/2"),
    ],
)
def test_data_axes_shrink_before_the_axes_of_the_model(
    strategy: str, num_ranks: int, rows: int | None, expected: str
) -> None:
    assert str(shrunk(Strategy.parse(strategy), num_ranks, rows)) == expected
