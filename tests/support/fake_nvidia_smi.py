"""A stand-in for nvidia-smi: a shell script that shows GPUs which this machine does not have."""

from pathlib import Path

_SCRIPT = """#!/bin/sh
case "$1" in
--query-gpu=name,memory.total,uuid) row='Stand-in GPU, 24576, {uuid}%s' ;;
--query-gpu=name,memory.total,memory.used) row='Stand-in GPU, 24576, 100' ;;
--query-gpu=uuid,utilization.gpu,memory.used,temperature.gpu,power.draw) row='{uuid}%s, 87, 11264, 65, 240.55' ;;
--query-gpu=uuid,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,power.limit,name)
    row='{uuid}%s, 87, 11264, 24576, 65, 240.55, 350.00, Stand-in GPU' ;;
--query-gpu=pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,uuid) row='4, 8, 16, {uuid}%s' ;;
nvlink) row='GPU 0: Stand-in GPU (UUID: {uuid}%s)\\n\\t Link 0: 25 GB/s\\n\\t Link 1: <inactive>\\n\\t Link 2: 26.562 GB/s' ;;
*) exit 0 ;;
esac
number=0
while [ $number -lt {count} ]; do
    printf "$row\\n" $number
    number=$((number + 1))
done
"""


def write_nvidia_smi(folder: Path, count: int, uuid: str = "GPU-0000000") -> list[str]:
    """Write the program into `folder`, with `count` GPUs; return their UUIDs, which begin with `uuid`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(_SCRIPT.replace("{count}", str(count)).replace("{uuid}", uuid))
    program.chmod(0o755)
    return [f"{uuid}{number}" for number in range(count)]
