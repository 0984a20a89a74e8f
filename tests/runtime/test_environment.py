"""What decides the bits of a program beside its text is compared; what does not, is not."""

import types

import jax
import pytest

from jaxcoll._runtime import fingerprint
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import compile_once
from jaxcoll._runtime.fingerprint import compile_shared, environment, parse_cpuinfo

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8488C
microcode\t: 0x2b000620
cpu MHz\t\t: 2400.000
flags\t\t: fpu sse sse2 avx avx2 avx512f amx_tile smep hypervisor md_clear

processor\t: 1
flags\t\t: none
"""


def lines():
    return environment(jax.devices()[0])


def marks():
    """Of one program that is compiled for other processes to run, too."""
    x = jax.numpy.ones(4)
    return compile_once(Call(jax.jit(lambda x: x + 1), (x,), (), "a call"), compile_shared).digest


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("XLA_FLAGS", "", "--xla_cpu_enable_fast_math=true"),
        ("XLA_FLAGS", "--xla_cpu_max_isa=AVX2", "--xla_cpu_max_isa=AVX2 --xla_cpu_max_isa=AVX"),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_x=1", "--xla_tpu_x=2"),
        ("NVIDIA_TF32_OVERRIDE", "", "0"),
    ],
)
def test_programs_differ_under_other_flags(monkeypatch, name, one, other):
    monkeypatch.setenv(name, one)
    under_one = lines(), marks()
    monkeypatch.setenv(name, other)
    under_other = lines(), marks()
    assert under_one[1] != under_other[1]
    differ = [pair for pair in zip(under_one[0], under_other[0], strict=True) if len(set(pair)) > 1]
    assert [line.partition(" ")[0] for line in differ[0]] == [name, name]


def test_programs_differ_under_other_settings(monkeypatch, optimized):
    before = marks()
    with jax.default_matmul_precision("highest"):
        assert marks() != before
        assert "setting jax_default_matmul_precision=highest" in lines()
    assert marks() == before
    jax.config.update("jax_disable_most_optimizations", True)  # no attribute of `jax.config`
    assert (quick := marks()) != before
    assert "setting jax_disable_most_optimizations=True" in lines()
    monkeypatch.setattr(fingerprint, "_processor", lambda: "another")
    assert marks() != quick
    assert "processor another" in lines()


@pytest.mark.parametrize(
    "other",
    [
        "--xla_cpu_max_isa=AVX2 --xla_dump_to=/tmp/of-one --xla_dump_hlo_as_text",
        "--xla_force_host_platform_device_count=4   --xla_cpu_max_isa=AVX2",
        "--xla_cpu_collective_timeout_seconds=60 --xla_cpu_max_isa=AVX --xla_cpu_max_isa=AVX2",
        "--xla_gpu_per_fusion_autotune_cache_dir=/tmp/a --xla_cpu_max_isa=AVX2",
    ],
)
def test_harmless_flags_are_not_compared(monkeypatch, other):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    before = lines()
    monkeypatch.setenv("XLA_FLAGS", other)
    assert lines() == before


def test_flags_in_file_are_read(monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_cpu_max_isa=AVX\n--xla_cpu_enable_fast_math=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert lines()[0] == "XLA_FLAGS --xla_cpu_enable_fast_math=true --xla_cpu_max_isa=AVX"


def test_processor_is_what_compilers_know():
    kind = "vendor_id GenuineIntel, cpu family 6, model 143, amx_tile avx avx2 avx512f sse sse2"
    assert parse_cpuinfo(INTEL) == kind
    same = INTEL.replace("md_clear", "").replace("8488C", "8481C").replace("2b000620", "2b000643")
    assert parse_cpuinfo(same.replace("2400", "3100")) == kind
    assert parse_cpuinfo(INTEL.replace(": 143", ": 106")) != kind
    assert parse_cpuinfo(INTEL.replace(" avx512f", "")) != kind
    arm = "processor : 0\nFeatures : fp asimd sve uscat\nCPU implementer : 0x41\nCPU part : 0xd40\n"
    assert parse_cpuinfo(arm) == "CPU implementer 0x41, CPU part 0xd40, asimd fp sve"


def test_accelerator_has_kind_and_driver():
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", client=client)
    assert "processor NVIDIA H200, PJRT C API cuda 12090" in environment(gpu)
