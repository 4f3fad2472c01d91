/*
 * One call on a UNIX stream socket whose answer ends with a line: JSON-RPC of the target.
 *
 * usage: unix_call PATH REQUEST
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char buffer[65536];
	ssize_t got;
	int peer;

	if (argc != 3 || strlen(argv[1]) >= sizeof(address.sun_path)) {
		fprintf(stderr, "usage: unix_call PATH REQUEST\n");
		return 2;
	}
	strcpy(address.sun_path, argv[1]);
	peer = socket(AF_UNIX, SOCK_STREAM, 0);
	if (peer < 0 || connect(peer, (struct sockaddr *)&address, sizeof(address)) != 0 ||
	    write(peer, argv[2], strlen(argv[2])) != (ssize_t)strlen(argv[2])) {
		perror(argv[1]);
		return 1;
	}
	while ((got = read(peer, buffer, sizeof(buffer))) > 0) {
		fwrite(buffer, 1, got, stdout);
		if (buffer[got - 1] == '\n')
			return 0;
	}
	fprintf(stderr, "%s: no answer\n", argv[1]);
	return 1;
}
