"""Images, that is files in the formats raw and qcow2, and volumes with the same contents.

- `qemuimg`: what qemu-img says of images, and copies;
- `importing`: an image becomes a volume;
- `exporting`: a volume becomes an image;
- `pieces`: what is copied in one go, and how far a copy has come;
- `sums`: checksums of both, by which they are verified.
"""
