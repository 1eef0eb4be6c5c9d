/*
 * Commands, which the progress thread executes while their callers wait.
 *
 * What always holds: each is answered once. A command that needs a flush of the NIC is postponed until the flush has
 * ended; all others are executed meanwhile.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stdlib.h>

static void answer(struct tk_fabric *fabric, struct command *command, int result)
{
	publish(fabric);
	pthread_mutex_lock(&fabric->inbox_lock);
	command->result = result;
	command->done = 1;
	if (command->abandoned)
		free(command);
	pthread_cond_broadcast(&fabric->command_done);
	pthread_mutex_unlock(&fabric->inbox_lock);
}

void run_command(struct tk_fabric *fabric, struct command *command)
{
	int result = command->run(fabric, command->argument);
	if (result != NOT_YET) {
		answer(fabric, command, result);
		return;
	}
	command->next = fabric->put_off;
	fabric->put_off = command;
}

/* Runs before any operation is handed to the NIC again. */
int run_put_off(struct tk_fabric *fabric)
{
	if (!nic_end_flush(fabric))
		return 0;
	struct command *command = fabric->put_off;
	fabric->put_off = NULL;
	fabric->nic.just_flushed = 1;
	for (struct command *next; command; command = next) {
		next = command->next;
		run_command(fabric, command);
	}
	fabric->nic.just_flushed = 0;
	return 1;
}

void refuse_put_off(struct tk_fabric *fabric)
{
	for (struct command *command = fabric->put_off, *next; command; command = next) {
		next = command->next;
		answer(fabric, command, -ESHUTDOWN);
	}
	fabric->put_off = NULL;
}
