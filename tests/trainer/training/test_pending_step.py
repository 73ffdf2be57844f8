"""Results of a step are read from copies in host memory."""

import pytest
import torch

from spotune_trainer.training.pending_step import HostCopy


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_a_copy_has_the_values_of_its_time(device: str) -> None:
    tensor = torch.tensor([[1.0, 2.5]], dtype=torch.float64, device=device)
    copy = HostCopy(tensor.flatten())
    assert copy.read() == [1.0, 2.5]
    assert HostCopy(tensor[0, 1]).read() == 2.5
