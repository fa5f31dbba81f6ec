import torch

# One thread for each share of a batch; torch itself stays single-threaded.
torch.set_num_threads(1)
