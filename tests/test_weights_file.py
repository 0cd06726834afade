"""Our reader of .safetensors files beside the package that writes them, and one sentence for what is no such file."""
import errno
import json
import sys

import pytest
import torch

from Runtime.errors import InputError
from Runtime.weights_file import DTYPES, read_weights


def write(path, header, content=b"", length=None):
    """A file by hand. header: text or what becomes JSON. length: what the first 8 bytes claim."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)
    return path


def entry(first, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def test_it_reads_what_the_package_writes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install -r requirements-export.txt")
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (3,), (2, 3, 5), (0, 4)]
    tensors = {f"{name} {shape}": (100 * torch.rand(shape, generator=generator)).to(dtype)
               for name, dtype in DTYPES.items() for shape in shapes}
    metadata = {"config": json.dumps({"a.b": 1}), "word": "Größe"}
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    found, found_metadata = read_weights(tmp_path / "theirs.safetensors")
    assert found_metadata == metadata and set(found) == set(tensors) and len(found) == len(DTYPES) * len(shapes)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_file_by_hand_without_metadata_at_an_odd_place(tmp_path):
    values = torch.tensor([1.5, -2.0])
    path = write(tmp_path / "odd.safetensors", {"b": entry(1, 9, [2]), "a": entry(0, 1, [1], "U8")},
                 b"\x07" + values.numpy().tobytes())
    for more in ("", " ", "  ", "   "):  # the header moves what comes after it through all places modulo 4
        text = json.dumps({"b": entry(1, 9, [2]), "a": entry(0, 1, [1], "U8")}) + more
        write(path, text, b"\x07" + values.numpy().tobytes())
        found, metadata = read_weights(path)
        assert metadata == {} and found["a"].tolist() == [7] and torch.equal(found["b"], values)
    found["b"][0] = 3.0  # its memory can be written to, as the optimizer of a further training would
    assert found["b"].tolist() == [3.0, -2.0]


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 12, [1])}


@pytest.mark.parametrize("header, words", [
    ("[1, 2]", "no JSON object"), ("{\"a\": ", "Expecting value"), ("\x00\x00", "Expecting value"),
    ({"a": 3}, "entry of a does not give"), ({"a": {**GOOD["a"], "more": 1}}, "entry of a does not give"),
    ({"a": entry(0, 12, [3], "F8_E4M3")}, "unknown dtype F8_E4M3"),
    ({"a": entry(0, 12, [3], ["F32"])}, "unknown dtype"),
    ({"a": entry(0, 12, [3.0])}, "shape of a is"), ({"a": entry(0, 12, [-3])}, "shape of a is"),
    ({"a": entry(0, 12, [True, 3])}, "shape of a is"),
    ({"a": {**entry(0, 12, [3]), "data_offsets": [0, 12, 12]}}, "not first and end"),
    ({"a": entry(-4, 8, [3])}, "data_offsets of a is"), ({"a": entry(8, 0, [2])}, "a has -8 bytes"),
    ({"a": entry(0, 12, [4])}, "a has 12 bytes, and its shape needs 16"),
    ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "a and b overlap"),
    ({"a": entry(0, 12, [3]), "b": entry(12, 12, [0, 2 ** 62, 4])}, "shape of b is .*, too large for a tensor"),
    ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, "gap of 4 bytes before b"),
    ({"a": entry(4, 12, [2])}, "gap of 4 bytes before a"),
    ({"a": entry(0, 8, [2])}, "end at byte 8, and there are 12"),
    ({**GOOD, "c": entry(12, 16, [1])}, "end at byte 16, and there are 12"),
    ({}, "end at byte 0, and there are 12"),
    ({**GOOD, "__metadata__": {"config": 3}}, "__metadata__ are not texts"),
    ({**GOOD, "__metadata__": ["config"]}, "__metadata__ are not texts"),
    ('{"a": 1, "a": 2}', "a stands twice"), ("[" * 100_000, "recursion"),
    ('{"a\n": 1}', "Invalid control character"),
])
def test_a_header_that_does_not_fit_its_file_is_one_sentence(tmp_path, header, words):
    path = write(tmp_path / "bad.safetensors", header, bytes(12))
    with pytest.raises(InputError, match=words) as error:
        read_weights(path)
    assert str(error.value).startswith(f"{path}: not a readable .safetensors file (") and "\n" not in str(error.value)


@pytest.mark.parametrize("length, words", [(2 ** 63, "claims 9223372036854775808 bytes"), (10 ** 6, "claims 1000000"),
                                           (0, "Expecting value"), (3, "Unterminated|Expecting")])
def test_a_length_that_is_not_that_of_the_header(tmp_path, length, words):
    with pytest.raises(InputError, match=words):
        read_weights(write(tmp_path / "bad.safetensors", GOOD, bytes(12), length))


def test_every_truncation_is_refused(tmp_path):
    whole = write(tmp_path / "good.safetensors", GOOD, bytes(12)).read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a readable .safetensors file"):
            read_weights(path)
    with pytest.raises(InputError, match="No such file"):
        read_weights(tmp_path / "none.safetensors")
    found, _ = read_weights(write(path, GOOD, bytes(12)))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"a": (2,), "b": (1,)}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
def test_a_disk_that_does_not_answer_is_no_damaged_file():
    with pytest.raises(OSError) as error:
        read_weights("/proc/self/mem")  # there, and an input/output error whoever reads it
    assert error.value.errno == errno.EIO
