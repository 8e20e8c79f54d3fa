"""A client of the FTPS gateway that keeps no rules: python3 - PORT CERTIFICATE FUNCTION"""

import select
import socket
import ssl
import struct
import sys
import time

PORT, CERTIFICATE, WHAT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
WAIT_S = 60


def tls():
    return ssl.create_default_context(cafile=CERTIFICATE)


class Control:
    def __init__(self):
        self.sock = socket.create_connection(("127.0.0.1", PORT), WAIT_S)
        self.file = self.sock.makefile("rb")
        assert self.reply().startswith("220")

    def reply(self):
        return self.whole_reply().splitlines(keepends=True)[-1]

    def whole_reply(self):
        lines = [self.file.readline().decode()]
        while lines[0][3:4] == "-" and lines[-1][:4] != lines[0][:3] + " ":
            lines.append(self.file.readline().decode())
        return "".join(lines)

    def send(self, line):
        self.sock.sendall(line if isinstance(line, bytes) else line.encode() + b"\r\n")

    def ask(self, line):
        self.send(line)
        return self.reply()

    def secure(self, context=None):
        self.sock = (context or tls()).wrap_socket(self.sock, server_hostname="127.0.0.1")
        self.file = self.sock.makefile("rb")

    def log_in(self, token="token-of-a"):
        assert self.ask("AUTH TLS").startswith("234")
        self.secure()
        for line, code in [("USER any", "331"), (f"PASS {token}", "230"), ("PBSZ 0", "200"), ("PROT P", "200")]:
            answer = self.ask(line)
            assert answer.startswith(code), answer
        return self

    def data(self):
        port = int(self.ask("EPSV").split("|")[3])
        return socket.create_connection(("127.0.0.1", port), WAIT_S)


def commands_before_the_handshake():
    control = Control()
    assert control.ask(b"AUTH TLS\r\nUSER any\r\nPASS token-of-a\r\n").startswith("234")
    control.secure()
    answer = control.ask("PWD")
    assert answer.startswith("530"), answer


def sessions_that_break():
    # More than one network may have at once.
    for _ in range(150):
        control = Control()
        assert control.ask("AUTH TLS").startswith("234")
        control.send(b"this is no handshake\r\n" * 10)
        try:
            while control.sock.recv(1000):
                pass
        except OSError:
            pass
        control.sock.close()
    Control().log_in()


def more_connections_than_files():
    socks = [socket.create_connection(("127.0.0.1", PORT), WAIT_S) for _ in range(80)]
    time.sleep(1)
    for sock in socks:
        sock.close()


def a_replacement_that_breaks():
    control = Control().log_in()
    for size, is_whole in [(100_000, True), (60_000, False)]:
        plain = control.data()
        assert control.ask("STOR replaced")[:3] in ("125", "150")
        data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
        data.sendall(b"x" * size)
        (data.unwrap() if is_whole else data).close()
        answer = control.reply()
        assert answer.startswith("226" if is_whole else "426"), answer
    answer = control.ask("SIZE replaced")
    assert answer == "213 59999\r\n", answer
    plain = control.data()
    assert control.ask("APPE replaced")[:3] in ("125", "150")
    data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
    data.sendall(b"y" * 40_001)
    data.unwrap().close()
    answer = control.reply()
    assert answer.startswith("226"), answer
    answer = control.ask("SIZE replaced")
    assert answer == "213 100000\r\n", answer


def active_connections():
    control = Control().log_in()
    for line in ["PORT 127,0,0,1,0,22", "EPRT |1|127.0.0.1|22|", "SITE CHMOD 777 f", "STOU"]:
        answer = control.ask(line)
        assert answer.startswith("500"), answer


def odd_names():
    control = Control().log_in()
    for name in [b"a\0b", b"a\nb", b"a\rb", b"\x1b[31m", b"\xff\xfe", b"\xc0\xae\xc0\xae/x", b"\xed\xa0\x80", "a\u0085b".encode()]:
        for command in [b"MKD ", b"SIZE ", b"DELE ", b"CWD ", b"STOR ", b"RNFR "]:
            answer = control.ask(command + name + b"\r\n")
            assert answer.startswith("501"), (name, answer)
    for name in ["../../etc", "/etc", "/../../../etc", "/a/../../etc", "..%2f..%2fetc", "/a/%2e%2e/%2e%2e/etc", "x" * 300, "d/" * 100]:
        for command in ["CWD", "SIZE", "RETR", "RNFR", "LIST"]:
            answer = control.ask(f"{command} {name}")
            assert answer[0] == "5", (command, name, answer)
    # They are names like others.
    for name in ["a?stat", "a#b", "a%2fb", "a&limit=1", "a\u3000b", "a b+c", "~", "-l", "'\"`$(id)"]:
        answer = control.ask(f"MKD /a/{name}")
        assert answer.startswith("257"), (name, answer)
        answer = control.ask(f"CWD /a/{name}")
        assert answer.startswith("250"), (name, answer)
        answer = control.ask(f"RMD /a/{name}")
        assert answer.startswith("250"), (name, answer)


def another_tenants_names():
    # The user of the tenant b asks with names of the tenant a, and with names that never were.
    before_these = {"RNTO": "RNFR own", "APPE": "SIZE", "STOR again": "REST 1", "RETR again": "REST 1"}
    with_data = ["LIST", "NLST", "MLSD", "RETR", "STOR", "APPE", "STOR again", "RETR again"]
    control = Control().log_in("token-of-b")
    plain = "CWD XCWD SIZE MDTM MLST STAT DELE RMD XRMD MKD XMKD RNFR RNTO OPTS HELP REST ALLO TYPE MODE STRU".split()
    for command in plain + with_data:
        for place in ["/NAME", "/NAME/in", "/NAME/in/f", "/NAME/in/new", "/b/../NAME/in/f", "../NAME/in/f", "/NAME/../NAME/in"]:
            said = []
            for name in ["a", "c"]:
                path, told = place.replace("NAME", name), []
                first = before_these.get(command)
                if first:
                    told.append(control.ask(f"{first} {path}" if first == "SIZE" else first))
                if command in with_data:
                    data = control.data()
                control.send(f"{command.split()[0]} {path}")
                answer = control.whole_reply()
                if answer[:3] in ("125", "150"):
                    # It takes the data connection before it asks the controller.
                    told.append("1xx")
                    data = tls().wrap_socket(data, server_hostname="127.0.0.1")
                    if command.split()[0] in ("STOR", "APPE"):
                        data.sendall(b"x")
                        data.unwrap()
                    else:
                        told.append(data.makefile("rb").read().decode())
                    answer = control.whole_reply()
                told += [answer, control.ask("PWD")]
                assert "secret" not in str(told), told
                said.append(str(told).replace(f"/{name}", "/NAME"))
            assert said[0] == said[1], (command, place, said)


def a_long_line():
    control = Control()
    control.send(b"USER " + b"x" * 100_000)
    answer = control.reply()
    assert answer.startswith("500"), answer
    try:
        assert control.file.read() == b""
    except ConnectionResetError:
        pass


def a_data_connection_that_breaks():
    # The end of TCP is not the end of TLS: somebody on the way may have made it.
    for hard in [False, True]:
        control = Control().log_in()
        plain = control.data()
        assert control.ask("STOR broken")[:3] in ("125", "150")
        data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
        data.sendall(b"x" * 100_000)
        if hard:
            data.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            data.close()
        else:
            socket.socket.shutdown(data, socket.SHUT_WR)
        answer = control.reply()
        assert answer.startswith("426"), answer
    # So is one that nobody has encrypted.
    control = Control().log_in()
    plain = control.data()
    assert control.ask("STOR broken")[:3] in ("125", "150")
    plain.sendall(b"x" * 100_000)
    plain.close()
    answer = control.reply()
    assert answer[:3] in ("426", "522"), answer


def an_upload_that_breaks_at_its_very_end():
    # All bytes have come, but not the end. A client that finds the whole size would think that the file is there.
    control = Control().log_in()
    for size, shown in [(100_000, "213 99999"), (2, "213 1"), (1, "550"), (0, "550")]:
        name = f"almost{size}"
        plain = control.data()
        assert control.ask(f"STOR {name}")[:3] in ("125", "150")
        data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
        data.sendall(b"x" * size)
        socket.socket.shutdown(data, socket.SHUT_WR)
        assert control.reply().startswith("426")
        answer = control.ask(f"SIZE {name}")
        assert answer.startswith(shown), (size, answer)
        if shown.startswith("550"):
            continue
        for command in ["APPE", f"REST {size - 1}"]:
            # It is there twice: what is sent again takes the place of what was sent before.
            if command != "APPE":
                assert control.ask(command).startswith("350")
                command = "STOR"
            plain = control.data()
            answer = control.ask(f"{command} {name}")
            assert answer[:3] in ("125", "150"), answer
            data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
            data.sendall(b"y")
            if command == "APPE":
                socket.socket.shutdown(data, socket.SHUT_WR)
                assert control.reply().startswith("426")
            else:
                data.unwrap()
                assert control.reply().startswith("226")
        data = control.data()
        assert control.ask(f"RETR {name}")[:3] in ("125", "150")
        got = tls().wrap_socket(data, server_hostname="127.0.0.1").makefile("rb").read()
        assert got == b"x" * (size - 1) + b"y", (size, len(got))
        assert control.reply().startswith("226")


def bytes_that_nobody_asked_for():
    # A client that only sends does not read them. When it closes its socket with them unread, TCP may drop the end of the file.
    control = Control().log_in()
    plain = control.data()
    assert control.ask("STOR unread")[:3] in ("125", "150")
    data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
    data.sendall(b"x")
    assert not select.select([data.fileno()], [], [], 0.5)[0]
    data.unwrap()
    assert control.reply().startswith("226")


def an_upload_that_is_given_up():
    for end in ["ABOR", "leave", "ALLO"]:
        control = Control().log_in()
        if end == "ALLO":
            assert control.ask("ALLO 200000").startswith("200")
        plain = control.data()
        assert control.ask("STOR broken")[:3] in ("125", "150")
        data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
        data.sendall(b"x" * 100_000)
        if end == "ABOR":
            control.send("ABOR")
        elif end == "leave":
            socket.socket.shutdown(control.sock, socket.SHUT_RDWR)
        try:
            data.unwrap()
        except (OSError, ValueError):
            pass
        if end != "leave":
            # It had said so before the end, so it comes first, however fast the gateway is.
            answer = control.reply()
            assert answer.startswith("426"), answer
        if end == "ABOR":
            answer = control.reply()
            assert answer.startswith("226"), answer


def a_transfer_that_is_stopped_before_it_begins():
    for command in ["STOR broken", "RETR whole", "LIST", "NLST"]:
        for connected in [False, True]:
            control = Control().log_in()
            port = int(control.ask("EPSV").split("|")[3])
            if connected:
                data = socket.create_connection(("127.0.0.1", port), WAIT_S)
            control.send(command)
            assert control.reply()[:3] in ("125", "150")
            for code in ["426", "226"]:
                answer = control.ask("ABOR") if code == "426" else control.reply()
                assert answer.startswith(code), (command, connected, answer)
            answer = control.ask("ABOR")
            assert answer.startswith("225"), answer
            # The next transfer is none of what was stopped.
            data = control.data()
            assert control.ask("NLST")[:3] in ("125", "150")
            assert b"whole" in tls().wrap_socket(data, server_hostname="127.0.0.1").recv(1000)
            answer = control.reply()
            assert answer.startswith("226"), answer


def an_upload_that_is_given_up_late():
    # After its end nobody knows which comes first. What the gateway answers is what it has done.
    for number in range(20):
        control = Control().log_in()
        name = f"late{number}"
        plain = control.data()
        assert control.ask(f"STOR {name}")[:3] in ("125", "150")
        data = tls().wrap_socket(plain, server_hostname="127.0.0.1")
        data.sendall(b"x" * 100_000)
        try:
            data.unwrap()
        except (OSError, ValueError):
            pass
        control.send("ABOR")
        first, second = control.reply()[:3], control.reply()[:3]
        assert (first, second) in [("226", "225"), ("426", "226")], (first, second)
        data = control.data()
        assert control.ask("NLST")[:3] in ("125", "150")
        names = tls().wrap_socket(data, server_hostname="127.0.0.1").makefile("rb").read()
        assert (name.encode() + b"\r\n" in names) == (first == "226"), (first, names)
        assert control.reply().startswith("226")


def strangers_at_the_data_port():
    control = Control().log_in()
    port = int(control.ask("EPSV").split("|")[3])
    for _ in range(5):
        stranger = socket.create_connection(("127.0.0.1", port), WAIT_S, ("127.0.0.2", 0))
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    answer = control.ask("NOOP")
    assert answer.startswith("200"), answer


def data_of_another_session():
    # Somebody behind the same address was faster than the client.
    for command in ["STOR stolen", "RETR whole", "LIST"]:
        for is_first in [True, False]:
            control = Control().log_in()
            plain = control.data()
            if is_first:
                assert control.ask(command)[:3] in ("125", "150")
            try:
                assert tls().wrap_socket(plain, server_hostname="127.0.0.1").recv(100) == b""
            except (ssl.SSLError, OSError):
                pass
            answer = control.reply() if is_first else control.ask(command)
            assert answer.startswith("522"), (command, is_first, answer)


def sessions_of_nobody():
    # Of two addresses, which take all places that there are. Who comes from a third one finds room, also at once.
    def connect(source):
        sock = socket.create_connection(("127.0.0.1", PORT), WAIT_S, (source, 0))
        return sock, sock.recv(100)

    held = []
    for source in ["127.0.0.2", "127.0.0.3"]:
        for _ in range(128):
            try:
                held.append(connect(source))
            except OSError:
                break
    assert len(held) > 200
    until = time.monotonic() + WAIT_S
    while True:
        try:
            Control().log_in()
            return
        except (OSError, AssertionError):
            assert time.monotonic() < until, "there is room"
            time.sleep(0.2)


def names_that_change():
    control = Control().log_in()
    assert control.ask("MKD /a/last").startswith("257")
    data = control.data()
    assert control.ask("NLST")[:3] in ("125", "150")
    assert b"last" in tls().wrap_socket(data, server_hostname="127.0.0.1").recv(1000)
    assert control.reply().startswith("226")
    other = Control().log_in()
    assert other.ask("RMD /a/last").startswith("250")
    answer = control.ask("CWD /a/last")
    assert answer.startswith("550"), answer


def a_browser():
    control = Control()
    control.ask("AUTH TLS")
    context = tls()
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        control.secure(context)
    except (ssl.SSLError, OSError):
        return
    raise AssertionError("it speaks with a browser")


def old_tls():
    control = Control()
    control.ask("AUTH TLS")
    context = tls()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    try:
        control.secure(context)
    except (ssl.SSLError, OSError):
        return
    raise AssertionError("it speaks an old TLS")


globals()[WHAT]()
