"""The main job as a story: `make demo` tells it, tests/libvirt/test_main_job.py asserts it."""
