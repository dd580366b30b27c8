"""The command line: compose configurations, check them, build their objects, and run them."""
