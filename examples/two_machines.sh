#!/bin/sh
# Try docs/two_machines.md on one machine: two hosts made of namespaces, and a switch.
#
#     sudo sh examples/two_machines.sh            the page's checks and first runs
#     sudo sh examples/two_machines.sh bash       a shell on node1; the hosts end with it
#     sudo RATE=1gbit sh examples/two_machines.sh bash      the same over links of 1 Gbit/s (tc tbf)
#
#     node1 192.168.1.11 ──eth0──┐
#                                ├── br0, the switch
#     node2 192.168.1.12 ──eth0──┘
#
# Each host has its own name, network, processes, /etc/hosts and /dev/shm, and an ssh server if
# OpenSSH's is installed. Both share processor, clock and disk; /srv/phalanx is one folder of both,
# as by NFS. The script needs Linux, root, iproute2 and util-linux. It leaves no process, file or
# key, also after Ctrl-C.

set -eu
NODES="node1 node2"
address() { echo "192.168.1.1${1#node}"; }
fail() {
    echo "two_machines.sh: $*" >&2
    exit 2
}

[ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] || fail "needs Linux and root: start it with sudo"
for program in ip nsenter setpriv unshare; do
    command -v $program > /dev/null || fail "needs $program: install iproute2 and util-linux"
done
BIN=${PHALANX_BIN:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin} # sudo drops an active environment
PATH=$BIN:$PATH:/usr/sbin:/sbin
command -v phalanx > /dev/null || fail "finds no phalanx: set PHALANX_BIN to the folder that has it"

FOLDER=$(mktemp -d)
HOSTS= # the first process of each: its end ends all others of the host
remove() {
    trap '' INT TERM HUP
    for host in $HOSTS; do
        kill -9 "$host" 2> /dev/null || true
    done
    wait
    rm -rf "$FOLDER"
}
trap remove EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# begin NAME: start a host, whose first process sleeps until it, or this script, is killed.
begin() {
    mkfifo "$FOLDER/$1.pid"
    setpriv --pdeathsig KILL unshare --net --uts --ipc --pid --mount --fork --kill-child sh -c '
        exec 2>&3 3>&- # unshare itself complains when the host is killed
        read -r pid rest < /proc/self/stat # the number outside of the host
        hostname "$1"
        mount -t proc proc /proc
        mount -t sysfs sysfs /sys
        mount -t tmpfs tmpfs /dev/shm
        ip link set lo up
        echo "$pid" > "$0/$1.pid"
        exec sleep infinity' "$FOLDER" "$1" 3>&2 2> /dev/null &
    read -r pid < "$FOLDER/$1.pid"
    HOSTS="$HOSTS $pid"
    eval "PID_$1=$pid"
}

# on HOST COMMAND...: run a command on a host, in this folder. The command alone heeds Ctrl-C.
on() {
    eval "pid=\$PID_$1"
    shift
    (
        trap '' INT
        exec nsenter --target "$pid" --net --uts --ipc --pid --mount \
            env --default-signal=INT sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
    )
}

unshare --net --uts --ipc --pid --mount --fork mount -t proc proc /proc ||
    fail "may make no namespaces: a container needs more rights (docker run --privileged)"
begin switch
on switch ip link add br0 type bridge
on switch ip link set br0 up
mkdir "$FOLDER/shared"
echo "127.0.0.1 localhost" > "$FOLDER/hosts"
for node in $NODES; do
    echo "$(address "$node") $node" >> "$FOLDER/hosts"
done
for node in $NODES; do
    begin "$node"
    eval "pid=\$PID_$node"
    ip link add eth0 netns "$pid" type veth peer name "$node" netns "$PID_switch"
    on "$node" ip address add "$(address "$node")/24" dev eth0
    on "$node" ip link set eth0 up
    on switch ip link set "$node" master br0 up
    on "$node" mount --bind "$FOLDER/hosts" /etc/hosts
    on "$node" mount -t tmpfs tmpfs /run # also hides caches of names
    on "$node" mount -t tmpfs tmpfs /srv
    on "$node" mkdir /run/sshd /srv/phalanx
    on "$node" mount --bind "$FOLDER/shared" /srv/phalanx
    if [ -n "${RATE:-}" ]; then # of what the switch sends to the host
        on switch tc qdisc add dev "$node" root tbf rate "$RATE" burst 256kb latency 50ms
    fi
done

# An ssh server on each host; both hosts have one key, and accept it.
HAS_SSH=no
if command -v sshd > /dev/null && command -v ssh > /dev/null && [ -d /etc/ssh ]; then
    mkdir "$FOLDER/ssh"
    ssh-keygen -q -t ed25519 -N "" -f "$FOLDER/ssh/key"
    cat > "$FOLDER/ssh/sshd_config" << EOF
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
EOF
    cat > "$FOLDER/ssh/ssh_config" << EOF
Host $NODES
    IdentityFile /etc/ssh/key
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
EOF
    for node in $NODES; do
        on "$node" mount --bind "$FOLDER/ssh" /etc/ssh
        on "$node" "$(command -v sshd)"
    done
    HAS_SSH=yes
fi

export XDG_CACHE_HOME="$FOLDER/cache" XDG_RUNTIME_DIR="$FOLDER" # not root's
if [ $# -gt 0 ]; then
    on node1 "$@"
    exit
fi

# show HOST COMMAND...: print a command, and run it on a host.
show() {
    printf '\n%s$ ' "$1"
    (shift && echo "$@")
    on "$@"
}

TRAIN=${TRAIN:-train --strategy dp2 --steps 20}
TORCHRUN="torchrun --nnodes 2 --master-addr node1 --master-port 29500 --nproc-per-node 1"
if command -v ping > /dev/null; then
    show node1 ping -c 3 node2
else
    printf '\nno round trip: ping is not installed\n'
fi
if [ $HAS_SSH = yes ]; then
    show node1 ssh node2 hostname
    show node1 phalanx doctor --hosts node1:1,node2:1 --out /srv/phalanx --write /srv/phalanx/pair.json
    show node1 phalanx launch --hosts node1:1,node2:1 -- $TRAIN --out /srv/phalanx/first
else
    printf '\nno ssh, doctor and launch: sshd is not installed\n'
fi
second="-m phalanx $TRAIN --out /srv/phalanx/second"
printf '\nnode2$ %s &\n' "$TORCHRUN --node-rank 1 $second"
on node2 $TORCHRUN --node-rank 1 $second > "$FOLDER/node2.log" 2>&1 &
show node1 $TORCHRUN --node-rank 0 $second
wait $!
