"""What tests share: waiting for conditions, real brokers, real worker processes."""
