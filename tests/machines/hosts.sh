#!/bin/bash
# Several hosts on one machine. Each is a network, UTS, PID, IPC, cgroup and mount namespace with an
# address, a name, an sshd, /run and /dev/shm of its own; a bridge in another namespace joins them.
# They share this machine's file system, as the hosts of a cluster share theirs. Needs root, iproute2,
# util-linux and openssh-server. HOSTS_FOLDER is the folder of its state, which must not exist before
# `up`.
#
#   hosts.sh up COUNT              start node1 to nodeCOUNT (two take a second)
#   hosts.sh pid N                 print the process id, on this machine, of host N's first process
#   hosts.sh exec N COMMAND...     run a command on host N, in this folder and environment
#   hosts.sh cut N | mend N        unplug the cable of host N; plug it in again
#   hosts.sh off N | on N          take the power from host N: its processes are gone; switch it on
#   hosts.sh down                  end everything, and delete HOSTS_FOLDER
set -eu
folder=${HOSTS_FOLDER:?is not set}
name=$(basename "$folder")
net=10.78.0

pid_of() { cat "$folder/$1.pid"; }

first_process() { # of host N: mounts, its name and sshd; then waits, and reaps orphans
    set -e
    local n=$1
    hostname "node$n"
    mount --make-rprivate /
    # Slurm's proctrack/cgroup wants the freezer of cgroup v1.
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/freezer
    mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer 2>/dev/null || true
    mount -t tmpfs -o size=2g tmpfs /dev/shm
    mount -t tmpfs tmpfs /run
    mkdir -p /run/sshd /run/munge ~root/.ssh
    mount --bind "$folder/hosts" /etc/hosts
    mount --bind "$folder/ssh" ~root/.ssh
    /usr/sbin/sshd -D -e -f "$folder/sshd_config" &
    for _ in $(seq 100); do [ ! -e /run/sshd.pid ] || break; sleep 0.05; done
    touch "$folder/$n.ready"
    trap 'exit 0' TERM
    while true; do sleep 3600 & wait $! || true; done
}

on() {
    local n=$1 freezer=/sys/fs/cgroup/freezer/$name-$1 outer child
    mkdir -p "$freezer" 2>/dev/null || true
    rm -f "$folder/$n.ready"
    (
        if [ -w "$freezer/cgroup.procs" ]; then echo "$BASHPID" > "$freezer/cgroup.procs"; fi
        exec setsid ip netns exec "$name-$n" unshare --uts --pid --ipc --cgroup --mount --fork \
            --kill-child --mount-proc bash "$0" first-process "$n"
    ) > "$folder/$n.log" 2>&1 < /dev/null &
    outer=$!
    for _ in $(seq 200); do
        [ ! -e "$folder/$n.ready" ] || break
        kill -0 $outer 2>/dev/null || { cat "$folder/$n.log" >&2; exit 1; }
        sleep 0.05
    done
    # `ip` replaces itself by unshare, which forks: its only child is the host's first process.
    child=$(tr -d ' ' < "/proc/$outer/task/$outer/children")
    echo "$child" > "$folder/$n.pid"
}

off() { # the end of its first process is the end of all of a host's processes
    local pid; pid=$(pid_of "$1")
    kill -9 "$pid" 2>/dev/null || true
    for _ in $(seq 100); do [ -e "/proc/$pid" ] || return 0; sleep 0.05; done
}

up() {
    local count=$1 n
    mkdir -m 755 "$folder"; mkdir -m 700 "$folder/ssh"
    echo "$count" > "$folder/count"
    ssh-keygen -q -t ed25519 -N '' -f "$folder/ssh/id_ed25519"
    ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
    cp "$folder/ssh/id_ed25519.pub" "$folder/ssh/authorized_keys"
    echo "127.0.0.1 localhost" > "$folder/hosts"
    for n in $(seq "$count"); do
        echo "$net.$n node$n" >> "$folder/hosts"
        echo "node$n slots=1" >> "$folder/hostfile"
        echo "node$n,$net.$n $(cut -d' ' -f1,2 "$folder/host_key.pub")" >> "$folder/ssh/known_hosts"
    done
    cat > "$folder/sshd_config" <<-CONFIG
		HostKey $folder/host_key
		PidFile /run/sshd.pid
		PermitRootLogin prohibit-password
		PasswordAuthentication no
		KbdInteractiveAuthentication no
		UsePAM no
		StrictModes no
		MaxStartups 100
		Subsystem sftp internal-sftp
	CONFIG
    ip netns add "$name"
    ip -n "$name" link add bridge type bridge stp_state 0 forward_delay 0
    ip -n "$name" link set bridge up
    for n in $(seq "$count"); do
        ip netns add "$name-$n"
        ip -n "$name" link add "port$n" type veth peer name eth0 netns "$name-$n"
        ip -n "$name" link set "port$n" master bridge up
        ip -n "$name-$n" link set lo up
        ip -n "$name-$n" addr add "$net.$n/24" dev eth0
        ip -n "$name-$n" link set eth0 up
        on "$n"
    done
}

down() {
    local n freezer
    for n in $(seq "$(cat "$folder/count" 2>/dev/null || echo 0)"); do
        ip netns pids "$name-$n" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name-$n" 2>/dev/null || true
        freezer=/sys/fs/cgroup/freezer/$name-$n
        for _ in $(seq 20); do
            [ -d "$freezer" ] || break
            find "$freezer" -depth -type d -exec rmdir {} \; 2>/dev/null || sleep 0.2
        done
    done
    ip netns del "$name" 2>/dev/null || true
    rm -rf "$folder"
}

case ${1:-} in
    up) up "$2" ;;
    down) down ;;
    pid) pid_of "$2" ;;
    exec) pid=$(pid_of "$2"); shift 2; exec nsenter -t "$pid" -n -u -i -p -m --wd="$PWD" -- "$@" ;;
    cut) ip -n "$name" link set "port$2" down ;;
    mend) ip -n "$name" link set "port$2" up ;;
    off) off "$2" ;;
    on) on "$2" ;;
    first-process) first_process "$2" ;;
    *) sed -n '2,/^set/p' "$0" | grep '^#'; exit 2 ;;
esac
