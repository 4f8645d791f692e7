#!/bin/sh
# Hardware counters of the three attention kernels at 1x16384, once each, at whatever clock the card has: counters.csv.
# sh experiments/power/counters.sh
exec ncu --clock-control none --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis \
    --section SchedulerStats --section WarpStateStats --section InstructionStats --metrics \
sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,\
sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor.sum,\
l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,lts__t_bytes.sum,dram__bytes.sum \
    --csv --page details -k 'regex:forward_kernel|dkv_kernel|dq_kernel' --launch-skip 3 -c 3 \
    python3 experiments/power/calls.py > counters.csv
