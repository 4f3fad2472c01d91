"""Tests of the real target process over its sockets."""
