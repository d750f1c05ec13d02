"""Who is there, and what moves between them: libp2p host, lanes, discovery, members, transfer."""
