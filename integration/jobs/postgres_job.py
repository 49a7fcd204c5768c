#!/usr/bin/env python3
"""A PostgreSQL server with clients that change it all the time, and a look at whether it is whole.

    postgres_job.py PROGRAMS FOLDER SCALE

PROGRAMS is where postgres and pgbench are. Prints "n 1", "n 2" and so on, once for each round of pgbench, and ends with 7
when something is wrong. Once FOLDER/finish is there, it compares the sums of all tables, has pg_amcheck look at every
page, prints "done" and ends with 0.
"""

import os
import subprocess
import sys
import time

PROGRAMS, FOLDER, SCALE = sys.argv[1:]
DATA = os.path.join(FOLDER, "data")
CONNECTION = ["-h", FOLDER, "-U", "postgres"]


def program(name, *arguments, **more):
    return subprocess.run([os.path.join(PROGRAMS, name), *arguments], text=True, capture_output=True, timeout=300, **more)


def need(done, what):
    if done.returncode != 0:
        print("WRONG", what, done.returncode, done.stdout[-2000:], done.stderr[-2000:], flush=True)
        os._exit(7)
    return done.stdout


def ask(question):
    return need(program("psql", *CONNECTION, "-Atc", question, "postgres"), question).strip()


need(program("initdb", "-D", DATA, "-U", "postgres", "-A", "trust", "--no-sync"), "initdb")
# Less memory than the tables have: pages are written all the time.
settings = {"shared_buffers": "16MB", "listen_addresses": "", "unix_socket_directories": FOLDER, "max_wal_size": "64MB",
            "checkpoint_timeout": "30s", "autovacuum_naptime": "2s", "jit": "off"}
command = [os.path.join(PROGRAMS, "postgres"), "-D", DATA]
for name, value in settings.items():
    command += ["-c", f"{name}={value}"]
with open(os.path.join(FOLDER, "server.log"), "ab") as log:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
end = time.monotonic() + 60
while program("pg_isready", *CONNECTION).returncode != 0:
    if time.monotonic() > end:
        print("WRONG: the server does not answer", flush=True)
        os._exit(7)
    time.sleep(0.1)
need(program("pgbench", *CONNECTION, "-i", "-q", "-s", SCALE, "postgres"), "pgbench -i")
ask("create extension amcheck")
n = 0
while True:
    n += 1
    need(program("pgbench", *CONNECTION, "-n", "-c", "4", "-t", "50", "postgres"), "pgbench")
    print("n", n, flush=True)
    if os.path.exists(os.path.join(FOLDER, "finish")):
        break
sums = ask(
    "select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers), "
    "(select sum(bbalance) from pgbench_branches), (select sum(delta) from pgbench_history)"
).split("|")
if len(set(sums)) != 1:
    print("WRONG: the tables do not agree:", sums, flush=True)
    os._exit(7)
need(program("pg_amcheck", *CONNECTION, "--heapallindexed", "postgres"), "pg_amcheck")
server.terminate()
if server.wait(60) != 0:
    print("WRONG: the server ended with", server.returncode, flush=True)
    os._exit(7)
print("done", flush=True)
