import pytest
import torch

# One thread for each share of a batch; torch itself stays single-threaded.
torch.set_num_threads(1)
pytest.register_assert_rewrite("row_checks", "command_checks")
