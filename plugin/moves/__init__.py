"""Volumes that go to another lvstore or pool of their target: `virtlun volume move`.

- `notes`: what is noted at the new volume, and how far the move is by that;
- `moverequest`: which volume is to go where, and what is there of it already;
- `targetcopy`: the copy of a volume that nobody uses;
- `blockcopy`: that of one that a VM uses, by the gateway;
- `naming`: which domains name a volume, and another one in its place;
- `moving`: all of it, one step after the other.

The new volume has its name from the beginning, so that nobody else takes that, and an xattr which
says of what it is, and whether it counts; with that the target shows it to nobody. So whoever is
killed at any point leaves one volume that counts, and the same command goes on from there.
"""
