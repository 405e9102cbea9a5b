"""Matrices of a model directory as winnow widens them, beside what the package that wrote it makes of them."""
import pathlib
import subprocess
import tempfile

import numpy as np
import torch


def compare(tool, name, directory, expected):
    """(values compared, values that differ) of `expected`, pairs of a tensor's name and its values. Those of winnow_model_tool are rounded
    to their type first."""
    values = different = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "matrices", directory, folder], check=True)
        for tensor, wanted in expected:
            got = torch.from_numpy(np.fromfile(pathlib.Path(folder, f"{tensor}.f32"), dtype=np.float32)).reshape(wanted.shape)
            wrong = int((got.to(wanted.dtype) != wanted).sum())
            values += wanted.numel()
            different += wrong
            if wrong:
                print(f"{name}: {wrong} of {wanted.numel()} values of {tensor} differ")
    return values, different
