"""The libvirt side: translation of domain XML, the gateway, the hook and the `virtlun` command."""
