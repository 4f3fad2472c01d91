"""A volume's data as a stream, whole or what changed since a snapshot, between hosts."""
