from torch.utils.data import DataLoader, Dataset

from vcagen.data.order import TrainingOrder


def batches(**changes: int) -> list[list[tuple[int, int, int]]]:
    settings = {
        "num_samples": 10,
        "seed": 3,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "rank": 0,
        "num_processes": 1,
        "first_step": 0,
        "max_steps": 15,
    }
    return list(TrainingOrder(**(settings | changes)))


def test_every_sample_once_an_epoch_across_batch_borders() -> None:
    indices = [index for batch in batches() for index, _, _ in batch]
    epochs = [indices[start : start + 10] for start in range(0, 60, 10)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert epochs[0] != epochs[1]
    assert batches() == batches()
    assert batches(seed=4) != batches()


def test_a_resumed_order_is_the_rest_of_the_whole_one() -> None:
    for first_step in (1, 5, 7, 14):  # 5: exactly at an epoch's end
        assert batches(first_step=first_step) == batches()[first_step:]


def test_processes_and_micro_batches_share_the_global_batch() -> None:
    whole = batches()
    shares = [batches(rank=rank, num_processes=2, micro_batch_size=1) for rank in range(2)]
    for step, batch in enumerate(whole):
        parts = [row for share in shares for micro in share[2 * step : 2 * step + 2] for row in micro]
        assert parts == batch


def test_worker_count_does_not_matter() -> None:
    class Keys(Dataset[tuple[int, int, int]]):
        def __getitem__(self, key: tuple[int, int, int]) -> tuple[int, int, int]:
            return key

    loaded = []
    for num_workers in (0, 2):
        order = TrainingOrder(10, 3, 4, 4, 0, 1, 0, 6)
        loaded.append(
            [[t.tolist() for t in batch] for batch in DataLoader(Keys(), batch_sampler=order, num_workers=num_workers)]
        )
    assert loaded[0] == loaded[1]
    assert len(loaded[0]) == len(order) == 6
