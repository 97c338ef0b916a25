"""What `watch` is made of: how it hangs on a loop, what it checks each step, dead updates."""
