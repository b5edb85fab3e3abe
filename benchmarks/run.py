"""Every benchmark that runs without an accelerator and without data of its own."""

from __future__ import annotations

from benchmarks import layouts_cpu, pretrain_cpu


def main() -> None:
    layouts_cpu.main()
    pretrain_cpu.main()


if __name__ == "__main__":
    main()
