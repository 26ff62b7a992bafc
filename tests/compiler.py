"""Flags for a compiler that optimises nothing: it is most of the time of the tests, and what it makes is as right."""

from importlib.metadata import version

QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # Later compilers may not know these, and die of what they do not know.
    + (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10.")
        else ""
    )
)
