"""Volumes that go to another host, with their VM if asked: `virtlun volume move --host`.

The steps have the names that libvirt's migration gives them. `virtlun volume incoming` on the other
host, which `ssh` runs, is the destination; it answers one request after the other.

| step | where | what |
| --- | --- | --- |
| prepare | destination | may the volume come, and what has an interrupted move left of it |
| receive | both | a snapshot is sent, whole or what changed; again while a VM writes much |
| | source | the VM is shut down; the volume is no disk any more (`virtlun.moved`) |
| receive | both | the last snapshot |
| confirm | source | the destination has all, durably, and counts: noted as "moved" |
| finish | destination | the volume is a disk (its `virtlun.move` goes) |
| define | destination | the domain is defined, and started |
| clean | both | the snapshots of the move go, and the source's volume |

Until "confirm" the source counts: whatever ends, the volume there is as it was, and what came to
the destination is no disk. From then on the same command does what is left.

- `wire`: requests, answers and streams, on one connection;
- `remote`: the program that runs the other side;
- `sourcenote`: what is noted at the volume that leaves;
- `destination`: the other side;
- `domainxml`: what a domain needs of its host, by its XML;
- `handover`: the domain that goes along;
- `sourcechecks`: may the volume leave, and which domain has it;
- `movesnapshots`: the snapshots that are sent;
- `takenback`: what a move has done here is undone while the volume counts here;
- `completion`: what is left when the destination counts;
- `sourceside`: all of it, one step after the other.
"""
