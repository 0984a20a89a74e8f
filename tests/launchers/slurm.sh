#!/bin/sh
# A Slurm cluster of two hosts that exist only here, and a command on it:
#
#   tests/launchers/slurm.sh srun -N2 -n4 python train.py
#
# Each host is a network namespace with a name and an address of its own; nothing of it can be reached from
# elsewhere, and nothing is left of it at the end. Needs root, and Debian's slurm-wlm, munge, iproute2.
# Jobs of the partition `high` preempt those of `low`, which are queued again. PROCTRACK=cgroup (needs version 1's
# freezer): as at most sites, Slurm finds and ends every process of a step.
set -eu
if [ -e /run/netns/jcn1 ]; then
    echo "such a cluster is running already" >&2
    exit 1
fi
here=$(mktemp -d /tmp/jaxcoll-slurm.XXXXXX)
chmod 755 "$here"
kinds="freezer memory cpuset devices cpuacct"

end() {
    for host in jcn1 jcn2; do
        ip netns pids "$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$host" 2>/dev/null || true
        rm -rf "/etc/netns/$host"
    done
    if [ -f "$here/munged.pid" ]; then kill "$(cat "$here/munged.pid")"; fi
    umount "$here"/cgroup.*/* 2>/dev/null || true
    for host in jcn1 jcn2; do
        for kind in $kinds; do find "/sys/fs/cgroup/$kind/$host" -depth -type d -exec rmdir {} + 2>/dev/null || true; done
    done
    rm -rf "$here"
}
trap end EXIT
trap 'exit 130' INT TERM

for i in 1 2; do
    ip netns add "jcn$i"
    ip -n "jcn$i" link set lo up
    mkdir -p "/etc/netns/jcn$i"
    # Over /etc/hosts, for what `ip netns exec` starts.
    printf '127.0.0.1 localhost\n10.77.0.1 jcn1\n10.77.0.2 jcn2\n' > "/etc/netns/jcn$i/hosts"
done
ip link add eth0 netns jcn1 type veth peer name eth0 netns jcn2
for i in 1 2; do
    ip -n "jcn$i" address add "10.77.0.$i/24" dev eth0
    ip -n "jcn$i" link set eth0 up
done

mkdir "$here/munge" "$here/state" "$here/spool.jcn1" "$here/spool.jcn2"
chmod 700 "$here/munge"
head -c 1024 /dev/urandom > "$here/munge/key"
chmod 400 "$here/munge/key"
munged --force --socket "$here/munge.socket" --key-file "$here/munge/key" --pid-file "$here/munged.pid" \
    --log-file "$here/munge/log" --seed-file "$here/munge/seed" 2> /dev/null

export SLURM_CONF="$here/slurm.conf"
cat > "$SLURM_CONF" << CONF
ClusterName=jaxcoll
SlurmctldHost=jcn1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$here/munge.socket
CredType=cred/munge
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool.%n
SlurmctldPidFile=$here/slurmctld.pid
SlurmdPidFile=$here/slurmd.%n.pid
SlurmctldLogFile=$here/slurmctld.log
SlurmdLogFile=$here/slurmd.%n.log
ProctrackType=proctrack/${PROCTRACK:-linuxproc}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=jcn1 NodeAddr=10.77.0.1 CPUs=4 State=UNKNOWN
NodeName=jcn2 NodeAddr=10.77.0.2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=jcn1,jcn2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
PartitionName=low Nodes=jcn1,jcn2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10 PreemptMode=REQUEUE
PartitionName=high Nodes=jcn1,jcn2 MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
CONF
cat > "$here/cgroup.conf" << CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=$here/cgroup
CgroupAutomount=no
CONF
if [ "${PROCTRACK:-}" = cgroup ]; then
    mkdir "$here/cgroup"
    for i in 1 2; do
        for kind in $kinds; do  # each host has its own part of this system's
            mkdir -p "$here/cgroup.$i/$kind" "/sys/fs/cgroup/$kind/jcn$i"
            if [ "$kind" = cpuset ]; then
                for file in cpuset.cpus cpuset.mems; do
                    cat "/sys/fs/cgroup/cpuset/$file" > "/sys/fs/cgroup/cpuset/jcn$i/$file"
                done
            fi
            mount --bind "/sys/fs/cgroup/$kind/jcn$i" "$here/cgroup.$i/$kind"
        done
    done
fi

on() {
    number=$1
    shift
    # A host's name is its own; what the system knows of it is not changed.
    ip netns exec "jcn$number" unshare --uts --mount sh -c \
        'hostname "jcn$0"; [ ! -d "$1.$0" ] || mount --rbind "$1.$0" "$1"; shift; exec "$@"' "$number" "$here/cgroup" "$@"
}
on 1 slurmctld
on 1 slurmd
on 2 slurmd
tries=0
until [ "$(on 1 sinfo -h -t idle -o %D 2> /dev/null)" = 2 ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 100 ]; then
        cat "$here"/*.log >&2
        echo "the cluster did not start" >&2
        exit 1
    fi
    sleep 0.2
done
status=0
on 1 "$@" || status=$?
exit "$status"
