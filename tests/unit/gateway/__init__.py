"""Unit tests of plugin.gateway: real sockets, but a fake libvirtd and a fake target behind them."""
