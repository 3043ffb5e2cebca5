"""What several test files share."""
import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)                                                    # a core for each worker


@pytest.fixture
def three_processes(monkeypatch):
    """share(work): what work() gives in each of three processes of a run; each must sum once."""
    def share(work):
        sums, parts = [], []
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(dist, "all_reduce", sums.append)
        for rank in range(3):
            monkeypatch.setattr(dist, "get_rank", lambda: rank)
            parts.append(work())
        assert len(sums) == 3
        return parts
    return share
