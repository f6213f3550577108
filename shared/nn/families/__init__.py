"""The families of target models: one small file each, that maps their config.json and tensor names to the one decoder."""
