import pytest
import torch

from fxskip.distill.data import as_windows
from fxskip.errors import FxskipError

CPU = torch.device("cpu")
IDS = torch.arange(15).reshape(5, 3)


def test_dicts_are_padded_on_the_right_and_count_only_what_is_labelled():
    rows = [
        {"input_ids": [4, 5, 6, 7]},
        {"input_ids": [0, 8, 9], "attention_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
    ]
    batch = as_windows("test", "data", rows, 10).batch(torch.arange(3), CPU)
    assert batch.input_ids_BL.tolist() == [[4, 5, 6, 7], [0, 8, 9, 0], [1, 2, 3, 0]]
    assert batch.attention_mask_BL.tolist() == [[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0]]
    # Position t predicts token t + 1; a padded position predicts nothing, not even a real token.
    assert batch.targets_BL.tolist() == [[5, 6, 7, -100], [-100, 9, -100, -100], [-100, 3, -100, -100]]
    assert batch.tokens == 9


def test_without_padding_there_is_no_mask():
    batch = as_windows("test", "data", IDS.int(), 15).batch(torch.tensor([1]), CPU)
    assert batch.attention_mask_BL is None
    assert batch.targets_BL.tolist() == [[4, 5, -100]]


def test_every_epoch_shows_every_window_once_in_another_order():
    windows = as_windows("test", "data", IDS, 15)
    batches = [windows.shuffled(step, 2, 0, CPU).input_ids_BL[:, 0] for step in range(10)]
    shown = (torch.cat(batches) // 3).tolist()
    epochs = [shown[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    other = torch.cat([windows.shuffled(step, 2, 1, CPU).input_ids_BL[:, 0] // 3 for step in range(10)])
    assert other.tolist() != shown
    assert torch.equal(windows.shuffled(7, 2, 0, CPU).input_ids_BL[:, 0], batches[7])


def test_the_digest_sees_every_part():
    base = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [1, 2, 3]}
    changes = [{}, {"input_ids": [1, 2, 4]}, {"attention_mask": [1, 1, 0]}, {"labels": [1, -100, 3]}]
    digests = {as_windows("test", "data", [base | change], 10).digest for change in changes}
    assert len(digests) == len(changes)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (iter([]), TypeError, "list_iterator; give an integer tensor"),
        (torch.zeros(3), FxskipError, r"data is torch.float32 \[3\]"),
        (IDS + 1, FxskipError, "window 4 has input_ids 15 at position 2"),
        ([{"input_ids": [1, 2], "labels": [1, 99]}], FxskipError, "window 0 has labels 99"),
        ([{"text": "a"}], FxskipError, r"data\[0\] has keys \['text'\]"),
        ([{"input_ids": [1, 2], "labels": [1]}], FxskipError, r"data\[0\]: labels is torch.int64 \[1\]"),
        ([{"input_ids": [1]}], FxskipError, "no token to predict"),
        ([], FxskipError, "no token to predict"),
    ],
)
def test_bad_data_is_named(data, error, message):
    with pytest.raises(error, match=message):
        as_windows("test", "data", data, 15)
