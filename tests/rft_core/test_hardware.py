import pytest
import torch

from rft_core import hardware
from rft_core.errors import SettingsError

CPU_INFO = "processor : 0\nmodel name : Some CPU 9\nflags : fpu avx2 avx512f {more}\nbugs :\n"


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx512_bf16", "bfloat16"), ("amx_bf16 amx_tile", "bfloat16"), ("avx512_vnni", "float32")]
)
def test_dtype_auto_follows_the_cpu(tmp_path, monkeypatch, flags, dtype):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(CPU_INFO.format(more=flags))
    found = hardware.cpu_flags(cpu_info)
    assert set(flags.split()) < found
    monkeypatch.setattr(hardware, "cpu_flags", lambda: found)
    assert hardware.resolve_dtype("auto", "cpu") == dtype


def test_a_machine_without_cpu_info_computes_in_float32(tmp_path):
    assert hardware.cpu_flags(tmp_path / "absent") == frozenset()
    assert hardware.cpu_name(tmp_path / "absent") == "unknown"


def test_a_given_dtype_stays():
    assert hardware.resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_device_auto_takes_cuda_if_present():
    assert hardware.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert hardware.resolve_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would be right")
def test_cuda_on_a_machine_without_it_names_the_mend():
    with pytest.raises(SettingsError, match=r"set model\.device to auto or cpu"):
        hardware.resolve_device("cuda")


def test_the_machine_has_cores_and_memory():
    assert hardware.num_cores() >= 1
    assert hardware.free_memory_bytes() > 0
