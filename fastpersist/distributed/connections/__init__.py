"""The connections between the ranks of a group: they carry whole frames, whatever the content.

Where to look:

    what goes over a connection   frames (kinds, lengths, tags)
    one connection                connection (handshake, frames in and out, machines that are down)
    all of a rank                 io_thread (`Connections`: who is connected, and the thread that serves them)
"""
