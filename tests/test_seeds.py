import torch

from vcagen.seeds import normal, sample_generator, seed_from, uniform


def test_keys_give_different_streams_and_the_same_key_the_same() -> None:
    seeds = {seed_from(0, "train", step, position) for step in range(100) for position in range(100)}
    assert len(seeds) == 10_000
    assert seed_from(1, "a") == seed_from(1, "a") != seed_from(1, "b")
    assert max(seeds) < 2**63


def test_rows_do_not_depend_on_their_batch() -> None:
    like = torch.empty(4, 3, 2, 2)
    together = normal(like, [sample_generator(7, i) for i in range(4)])
    for i in range(4):
        assert torch.equal(together[i : i + 1], normal(like[:1], [sample_generator(7, i)]))
    assert torch.equal(
        uniform([sample_generator(7, i) for i in range(4)], torch.device("cpu"))[2:],
        uniform([sample_generator(7, i) for i in range(2, 4)], torch.device("cpu")),
    )
