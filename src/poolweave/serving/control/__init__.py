"""The control protocol between the door or a coordinator and instances: messages, and both sides' sockets."""
