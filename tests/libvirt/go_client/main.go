// A client of libvirt in Go, as Terraform's provider is: go-libvirt, which speaks libvirt's protocol
// itself, and libvirtxml, libvirt's own structures for its XML.
//
//	go_client SOCKET
//
// Each line of its input is a call, {"call": NAME, "words": [...]}, and each line of its output what
// came of it: {"made": RESULT, "refused": TEXT}.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/digitalocean/go-libvirt"
	"github.com/digitalocean/go-libvirt/socket/dialers"
	"libvirt.org/go/libvirtxml"
)

const (
	all          = 1
	eventTimeout = 60 * time.Second
	both         = libvirt.DomainDeviceModifyLive | libvirt.DomainDeviceModifyConfig
)

type client struct {
	*libvirt.Libvirt
	events map[string]<-chan any
}

type call func(client, []string) (any, error)

var calls = map[string]call{
	"domains": domains,
	"pools":   pools,
	"volumes": volumes,
	"create":  create,
	"delete":  remove,
	"upload":  upload,
	"read":    read,
	"attach":  attach,
	"disks":   disks,
	"stats":   stats,
	"resize":  resize,
	"detach":  detach,
}

// domains returns the names of all domains, running or not.
func domains(l client, _ []string) (any, error) {
	found, _, err := l.ConnectListAllDomains(all, 0)
	names := []string{}
	for _, each := range found {
		names = append(names, each.Name)
	}
	return names, err
}

// pools returns the type of each pool, by its name.
func pools(l client, _ []string) (any, error) {
	found, _, err := l.ConnectListAllStoragePools(all, 0)
	types := map[string]string{}
	for _, each := range found {
		text, err := l.StoragePoolGetXMLDesc(each, 0)
		if err != nil {
			return nil, err
		}
		pool := libvirtxml.StoragePool{}
		if err := pool.Unmarshal(text); err != nil {
			return nil, err
		}
		types[pool.Name] = pool.Type
	}
	return types, err
}

// volumes returns the capacity of each volume of a pool, by its path.
func volumes(l client, words []string) (any, error) {
	pool, err := l.StoragePoolLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	found, _, err := l.StoragePoolListAllVolumes(pool, all, 0)
	sizes := map[string]uint64{}
	for _, each := range found {
		text, err := l.StorageVolGetXMLDesc(each, 0)
		if err != nil {
			return nil, err
		}
		volume := libvirtxml.StorageVolume{}
		if err := volume.Unmarshal(text); err != nil {
			return nil, err
		}
		sizes[volume.Target.Path] = volume.Capacity.Value
	}
	return sizes, err
}

// create makes a thin volume: POOL NAME BYTES.
func create(l client, words []string) (any, error) {
	size, err := strconv.ParseUint(words[2], 10, 64)
	if err != nil {
		return nil, err
	}
	pool, err := l.StoragePoolLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	volume := libvirtxml.StorageVolume{
		Name:       words[1],
		Capacity:   &libvirtxml.StorageVolumeSize{Unit: "bytes", Value: size},
		Allocation: &libvirtxml.StorageVolumeSize{Value: 0},
	}
	text, err := volume.Marshal()
	if err != nil {
		return nil, err
	}
	made, err := l.StorageVolCreateXML(pool, text, 0)
	return made.Key, err
}

// volume finds one: POOL NAME.
func volume(l client, words []string) (libvirt.StorageVol, error) {
	pool, err := l.StoragePoolLookupByName(words[0])
	if err != nil {
		return libvirt.StorageVol{}, err
	}
	return l.StorageVolLookupByName(pool, words[1])
}

// remove deletes a volume: POOL NAME.
func remove(l client, words []string) (any, error) {
	found, err := volume(l, words)
	if err != nil {
		return nil, err
	}
	return nil, l.StorageVolDelete(found, 0)
}

// upload writes to a volume from its beginning, as Terraform does with an image: POOL NAME TEXT.
func upload(l client, words []string) (any, error) {
	found, err := volume(l, words)
	if err != nil {
		return nil, err
	}
	data := []byte(words[2])
	return nil, l.StorageVolUpload(found, bytes.NewReader(data), 0, uint64(len(data)), 0)
}

// read returns the beginning of a volume: POOL NAME BYTES.
func read(l client, words []string) (any, error) {
	length, err := strconv.ParseUint(words[2], 10, 64)
	if err != nil {
		return nil, err
	}
	found, err := volume(l, words)
	if err != nil {
		return nil, err
	}
	var data bytes.Buffer
	err = l.StorageVolDownload(found, &data, 0, length, 0)
	return data.String(), err
}

// disk returns the XML of a disk that is a volume: POOL NAME DEVICE ALIAS.
func disk(words []string) (string, error) {
	made := libvirtxml.DomainDisk{
		Device: "disk",
		Source: &libvirtxml.DomainDiskSource{
			Volume: &libvirtxml.DomainDiskSourceVolume{Pool: words[0], Volume: words[1]},
		},
		Target: &libvirtxml.DomainDiskTarget{Dev: words[2], Bus: "scsi"},
		Alias:  &libvirtxml.DomainAlias{Name: words[3]},
	}
	return made.Marshal()
}

// attach has a domain have a volume as a disk, now and later: DOMAIN, and as disk.
func attach(l client, words []string) (any, error) {
	domain, err := l.DomainLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	text, err := disk(words[1:])
	if err != nil {
		return nil, err
	}
	if err := l.DomainAttachDeviceFlags(domain, text, uint32(both)); err != nil {
		return nil, err
	}
	return l.next("added")
}

// disks returns the sources of a domain's disks, by their names in it: DOMAIN.
func disks(l client, words []string) (any, error) {
	domain, err := l.DomainLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	text, err := l.DomainGetXMLDesc(domain, 0)
	if err != nil {
		return nil, err
	}
	found := libvirtxml.Domain{}
	if err := found.Unmarshal(text); err != nil {
		return nil, err
	}
	sources := map[string]string{}
	for _, each := range found.Devices.Disks {
		if each.Source == nil || each.Source.Volume == nil {
			return nil, fmt.Errorf("disk %s is of no volume", each.Target.Dev)
		}
		sources[each.Target.Dev] = each.Source.Volume.Pool + "/" + each.Source.Volume.Volume
	}
	return sources, nil
}

// stats returns how many bytes a domain has written to a disk: DOMAIN DEVICE.
func stats(l client, words []string) (any, error) {
	domain, err := l.DomainLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	_, _, _, written, _, err := l.DomainBlockStats(domain, words[1])
	return written, err
}

// resize gives a disk another size: DOMAIN DEVICE BYTES.
func resize(l client, words []string) (any, error) {
	size, err := strconv.ParseUint(words[2], 10, 64)
	if err != nil {
		return nil, err
	}
	domain, err := l.DomainLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	return nil, l.DomainBlockResize(domain, words[1], size, libvirt.DomainBlockResizeBytes)
}

// detach takes a disk from a domain, and returns once libvirt says that it is gone, as attach.
func detach(l client, words []string) (any, error) {
	domain, err := l.DomainLookupByName(words[0])
	if err != nil {
		return nil, err
	}
	text, err := disk(words[1:])
	if err != nil {
		return nil, err
	}
	if err := l.DomainDetachDeviceFlags(domain, text, uint32(both)); err != nil {
		return nil, err
	}
	return l.next("removed")
}

// next waits for an event, and returns the alias of the device that it is about.
func (l client) next(kind string) (string, error) {
	select {
	case event := <-l.events[kind]:
		switch told := event.(type) {
		case *libvirt.DomainEventCallbackDeviceAddedMsg:
			return told.DevAlias, nil
		case *libvirt.DomainEventCallbackDeviceRemovedMsg:
			return told.Msg.DevAlias, nil
		}
		return "", fmt.Errorf("an event %T", event)
	case <-time.After(eventTimeout):
		return "", fmt.Errorf("no event of a device that was %s", kind)
	}
}

type asked struct {
	Call  string   `json:"call"`
	Words []string `json:"words"`
}

type answer struct {
	Made    any    `json:"made"`
	Refused string `json:"refused"`
}

func main() {
	l := client{
		libvirt.NewWithDialer(dialers.NewLocal(dialers.WithSocket(os.Args[1]))),
		map[string]<-chan any{},
	}
	fail(l.ConnectToURI(libvirt.QEMUSystem))
	for kind, event := range map[string]libvirt.DomainEventID{
		"added":   libvirt.DomainEventIDDeviceAdded,
		"removed": libvirt.DomainEventIDDeviceRemoved,
	} {
		stream, err := l.SubscribeEvents(context.Background(), event, nil)
		fail(err)
		l.events[kind] = stream
	}
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		line := asked{}
		fail(json.Unmarshal(lines.Bytes(), &line))
		made, err := calls[line.Call](l, line.Words)
		told := answer{Made: made}
		if err != nil {
			told = answer{Refused: err.Error()}
		}
		fail(out.Encode(told))
	}
	fail(l.Disconnect())
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
