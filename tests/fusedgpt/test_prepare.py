"""What the prepare scripts share: bins are written whole or not at all."""

import pytest

from fusedgpt import prepare
from fusedgpt.errors import UserError


def test_a_failed_preparation_keeps_the_old_one(tmp_path):
    def broken():
        yield [1, 2, 3]
        raise RuntimeError("cut off")

    options = dict(source="x", tokenizer="byte", vocab_size=256)
    prepare.write(tmp_path, {"train": [[1, 2]], "val": [[3]]}, **options)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="cut off"):
        prepare.write(tmp_path, {"train": [[9, 9]], "val": broken()}, **options)
    with pytest.raises(UserError, match="val split is empty"):
        prepare.write(tmp_path, {"train": [[9, 9]], "val": []}, **options)
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}
