"""Every benchmark at toy size: it runs, its contenders do the same work, and what it writes."""
import pytest
import torch

import bench
from gril import GrilMixer
from pictures import plots
from test_gril import agree, seeded


@pytest.mark.parametrize("what, sizes", (
    ("blocks", dict(H=32, lengths=(16, 32))), ("growth", dict(lengths=(32, 64))),
    ("streaming", dict(H=32, positions=(3, 9))), ("icl", dict(count=1)), ("core", dict())))
def test_every_benchmark(monkeypatch, tmp_path, capsys, what, sizes):
    small, laptop = dict(B=2, T=24, H=16, P=8, J=2), dict(B=2, T=16, H=16, P=16, J=2)
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    monkeypatch.setattr(bench, "PRESETS", dict(small=small, laptop=laptop))
    rows = bench.BENCHES[what](1, **sizes)
    assert rows and all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert capsys.readouterr().out.count("ratio") == len(rows)
    if what in bench.PICTURES:
        bench.plot(what, rows)
        assert (tmp_path / f"bench_{what}.png").stat().st_size > 5_000


def test_generation_keeps_its_state_but_for_attention(monkeypatch):
    small = dict(bench.NextToken.recipes["bytes"], layers=1, H=16, inner=16, P=8, J=2)
    monkeypatch.setitem(bench.NextToken.recipes, "bytes", small)
    sizes = {}
    for row in bench.generation(1, positions=(30, 90, 270)):
        sizes.setdefault(row["model"], []).append(row["megabytes"])
    attention = sizes.pop("transformer")
    assert len(attention) == 2 and attention[1] == pytest.approx(3 * attention[0])
    assert all(len(size) == 3 and len(set(size)) == 1 for size in sizes.values())


def test_the_command_line(monkeypatch, tmp_path, capsys):
    rows_of = {}
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    monkeypatch.setitem(bench.BENCHES, "icl", lambda rounds: [dict(f=1, ratio=float(rounds))])
    monkeypatch.setattr(bench, "plot", lambda what, rows: rows_of.update({what: rows}))
    bench.main(["icl", "--rounds", "3", "--plot"])
    assert rows_of == dict(icl=[dict(f=1, ratio=3.0)])
    if not torch.cuda.is_available():
        bench.main(["cuda-check"])
        assert "no CUDA device" in capsys.readouterr().out


def test_what_cannot_be_written_is_said_before_it_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(plots, "IMAGES", tmp_path / "file/images")
    monkeypatch.setitem(bench.BENCHES, "icl", lambda rounds: pytest.fail("measured first"))
    with pytest.raises(SystemExit, match="^bench.py: .*file/images"):
        bench.main(["icl", "--plot"])


def test_the_dense_layers_and_the_recurrence_are_the_whole_mixer():
    torch.manual_seed(0)
    mixer, z = GrilMixer(8, 8, 2).double(), seeded(2, 9, 8)
    log_rho, theta, scale = mixer.gates()
    v, k, u = mixer.tokens(z, scale)
    o, _ = mixer.recur(v, k, u, log_rho, theta, mixer.start(z))
    dense = mixer.output(v + k + u, z)
    agree(1e-12, mixer=(mixer.output(o, z), mixer(z)), dense=(dense, bench.Dense(mixer)(z)))


def test_the_plainest_loop_learns_what_ours_learns(monkeypatch):
    """Both end at gradient descent's loss, so that it is the same work that is timed."""
    losses, backward = {}, torch.Tensor.backward

    def noted(loss, *args, **kwargs):
        losses[name] = loss.item()
        return backward(loss, *args, **kwargs)
    monkeypatch.setattr(torch.Tensor, "backward", noted)
    for name, make in (("ours", bench.our_loop), ("plainest", bench.plainest_loop)):
        bench.interleaved({name: make(5, 10, 256)}, 1, times=300)
        assert losses[name] == pytest.approx(0.0676, rel=0.2)
