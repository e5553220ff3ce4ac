"""One thread for every test: two that share busy cores are many times slower than one."""

import torch

torch.set_num_threads(1)
