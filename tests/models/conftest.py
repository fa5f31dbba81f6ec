import torch

# Two threads that spin make tiny steps slower, most of all beside other test workers.
torch.set_num_threads(1)
