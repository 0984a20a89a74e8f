"""The texts that benchmarks/hlo_text.py makes are programs with as many collectives as it says."""

import pytest

import jaxcoll as jc
from benchmarks.hlo_text import in_flight, layers, measure, results, show, state


@pytest.mark.product
@pytest.mark.parametrize("make", [results, in_flight, state, layers])
@pytest.mark.timeout(120)
def test_both_readers_read_texts(make, tmp_path, capsys):
    file = tmp_path / "step.hlo"
    file.write_text(make(16))
    report = jc.inspect(file.read_text())
    assert len(report.collectives) == (2 if make is layers else 16)
    assert report.uncounted == ()
    for reader in ("jaxcoll", "jaxlib"):
        show(reader, *measure(reader, file))
    assert capsys.readouterr().out.count("ratio") == 2
