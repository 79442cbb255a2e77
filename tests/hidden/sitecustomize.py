"""Python runs this when it starts, in launched ranks too: DeepSpeed's launcher numbers GPUs for them, even on CPUs."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
