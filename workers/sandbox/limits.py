"""The limits of one execution. The defaults, with the reasons for them, are those of `conf/environment.py`."""

from dataclasses import dataclass

from penstock.conf.environment import SandboxConfig

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one execution, in seconds and bytes. Plain data, which also the program inside the fence reads."""

    cpu_s: float = SandboxConfig.cpu_s
    wall_s: float = SandboxConfig.wall_s
    memory_bytes: int = SandboxConfig.memory_mib * MIB
    num_processes: int = SandboxConfig.num_processes
    file_bytes: int = SandboxConfig.file_mib * MIB
    tmp_bytes: int = SandboxConfig.tmp_mib * MIB
    tmp_files: int = SandboxConfig.tmp_files
    output_bytes: int = int(SandboxConfig.output_mib * MIB)
    require_cgroup: bool = SandboxConfig.require_cgroup

    @classmethod
    def of(cls, config: SandboxConfig) -> "Limits":
        return cls(
            cpu_s=config.cpu_s,
            wall_s=config.wall_s,
            memory_bytes=config.memory_mib * MIB,
            num_processes=config.num_processes,
            file_bytes=config.file_mib * MIB,
            tmp_bytes=config.tmp_mib * MIB,
            tmp_files=config.tmp_files,
            output_bytes=int(config.output_mib * MIB),
            require_cgroup=config.require_cgroup,
        )
