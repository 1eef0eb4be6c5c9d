"""The wire: generated gRPC stubs, the record codec and the ack words."""
