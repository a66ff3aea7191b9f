#!/bin/bash
# A Slurm cluster on the hosts of hosts.sh: slurmctld on node1, slurmd and munged on each host. Needs
# besides what hosts.sh needs: slurmctld, slurmd, slurm-client and munge. There is no accounting. Each
# node has eight GPUs by name (they are like /dev/null), so that --gpus-per-node=8 can be met.
#
#   slurm.sh up COUNT       hosts and Slurm (two hosts take three seconds); hosts.sh down ends both
#   slurm.sh daemons N      start munged and slurmd of host N again, after hosts.sh on N
#
# Two times are shorter than Slurm's own: nodes
# count as down after 20 s (300), and a requeued job may start after 5 s (120). Two are longer, as
# a busy machine needs them: jobs end 2 minutes after their limit, and are killed 2 minutes after TERM.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
slurm=${HOSTS_FOLDER:?is not set}/slurm

daemons() {
    bash "$here/hosts.sh" exec "$1" env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=~root \
        SLURM_CONF="$slurm/slurm.conf" bash -ec '
        mkdir -p /run/slurmd  # the path of a socket in it may have 108 characters
        munged --force --key-file "$1/munge.key" --socket /run/munge/munge.socket.2 \
            --pid-file /run/munge/munged.pid --log-file /run/munge/munged.log \
            --seed-file /run/munge/seed --num-threads 2
        if [ "$(hostname)" = node1 ] && [ ! -e /run/slurmctld.pid ]; then slurmctld; fi
        slurmd -N "$(hostname)"' daemons "$slurm"
}

up() {
    local count=$1 n
    bash "$here/hosts.sh" up "$count"
    mkdir -p "$slurm/state" "$slurm/log"
    (umask 077; head -c 128 /dev/urandom > "$slurm/munge.key")
    cat > "$slurm/slurm.conf" <<-CONFIG
		ClusterName=test
		SlurmctldHost=node1
		SlurmUser=root
		SlurmdUser=root
		AuthType=auth/munge
		AuthInfo=socket=/run/munge/munge.socket.2,cred_expire=5
		StateSaveLocation=$slurm/state
		SlurmdSpoolDir=/run/slurmd
		SlurmctldPidFile=/run/slurmctld.pid
		SlurmdPidFile=/run/slurmd.pid
		SlurmctldLogFile=$slurm/log/slurmctld
		SlurmdLogFile=$slurm/log/slurmd-%n
		ProctrackType=proctrack/cgroup
		TaskPlugin=task/none
		JobAcctGatherType=jobacct_gather/none
		AccountingStorageType=accounting_storage/none
		SelectType=select/cons_tres
		SelectTypeParameters=CR_Core
		SchedulerParameters=sched_interval=2,bf_interval=2,default_queue_depth=10
		MpiDefault=none
		ReturnToService=2
		SlurmdTimeout=20
		KillWait=120
		MinJobAge=300
		GresTypes=gpu
		NodeName=node[1-$count] CPUs=2 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
		PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=2 State=UP
	CONFIG
    for n in 0 1 2 3 4 5 6 7; do mknod "$slurm/gpu$n" c 1 3; done
    echo "Name=gpu File=$slurm/gpu[0-7]" > "$slurm/gres.conf"
    # slurmd starts its cgroup plugin even where nothing uses it; that of v1 needs no mount.
    printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' > "$slurm/cgroup.conf"
    for n in $(seq "$count"); do daemons "$n"; done
    for _ in $(seq 100); do
        states=$(bash "$here/hosts.sh" exec 1 env SLURM_CONF="$slurm/slurm.conf" sinfo -h -o %t 2>/dev/null || true)
        [ "$states" != idle ] || return 0
        sleep 0.2
    done
    tail -n 20 "$slurm"/log/* >&2
    exit 1
}

case ${1:-} in
    up) up "$2" ;;
    daemons) daemons "$2" ;;
    *) sed -n '2,/^set/p' "$0" | grep '^#'; exit 2 ;;
esac
